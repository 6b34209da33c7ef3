"""LSH attention as a layer: its projections, its rotations, and arguments that it refuses."""

import copy

import pytest
import torch

from relvit.families.reformer import LSHAttention, reference
from relvit.layers import ParabolicPosition2d, RelativePosition2d, SlopePosition2d
from relvit.ops import Grid, make_grid


def layer(bucket_size=3, rounds=2, **options):
    torch.manual_seed(0)
    position = RelativePosition2d(4, 3, rel_terms="b", max_distance=2, init_std=1.0)
    return LSHAttention(12, 3, position, bucket_size, rounds, **options).double().eval()


def tokens(grid, batch=2):
    count = grid.prefix + grid.height * grid.width
    return torch.randn(batch, count, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "qk_norm": True, "scale_norm": True, "proj_bias": False}])
def test_is_the_operation_between_projections(options):
    attn, grid = layer(**options), Grid(5, 4, prefix=1)
    x = tokens(grid)
    qk, v = attn.qk_v(x).chunk(2, dim=-1)
    qk, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (qk, v))
    # 21 tokens with 3 per bucket make 6 buckets, because buckets come in pairs.
    rotations = attn.rotations[:, :, :3]
    out = reference.lsh_attention(attn.qk_norm(qk), v, grid, rotations, terms=attn.position(grid))
    expected = attn.proj(attn.norm(out.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(attn(x, grid), expected, rtol=0, atol=1e-12)


def test_rotations_are_fixed_in_evaluation_and_drawn_in_training():
    grid = make_grid(6, 5)
    one, other = layer(), copy.deepcopy(layer())
    assert torch.equal(one(tokens(grid), grid), other(tokens(grid), grid))
    assert "rotations" not in one.state_dict()
    one.train()
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(one(tokens(grid), grid))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    # The rotations of fewer rounds are the first of those of more rounds.
    assert torch.equal(layer(rounds=1).rotations[0], layer(rounds=3).rotations[0])


def test_made_without_memory_and_filled_later():
    with torch.device("meta"):
        empty = LSHAttention(12, 3, SlopePosition2d(4, 3), 3, 2)
    filled = empty.to_empty(device="cpu")
    filled.init_non_persistent_buffers()
    assert torch.equal(filled.rotations, layer().rotations.float())


class ScaledByTokens(RelativePosition2d):
    """A position that inherits `forward` from the tables, but whose terms depend on the tokens."""

    def terms(self, x, grid, key_grid):
        terms = super().terms(x, grid, key_grid)
        return terms._replace(bias=type(terms.bias)(*(x.mean() * table for table in terms.bias)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_size": 0}, "bucket_size must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"position": ParabolicPosition2d(4, 3)}, "LSH attention takes no position .*, got ParabolicPosition2d"),
        ({"position": ScaledByTokens(4, 3, rel_terms="b")}, "no position that depends on tokens .* got ScaledByTokens"),
        ({"position": RelativePosition2d(4, 3)}, "alone, got relative terms on key and value: build models with"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LSHAttention(**{"dim": 12, "num_heads": 3, **arguments})
