"""The contract of all positions: outputs of a layer with them, gradients, precision, sizes, devices."""

from functools import partial

import pytest
import torch
from draws import brute_force
from position_cases import DIM, HEADS, LAYOUTS, draw, layer, plain, run
from timm.models._manipulate import reinit_non_persistent_buffers
from torch.nn.utils import prune

from relvit.families.transformer_xl import TransformerXLPosition2d
from relvit.layers import (
    CombinedPosition2d,
    ContinuousPosition2d,
    FirePosition2d,
    LookHerePosition2d,
    LowRankPosition2d,
    ParabolicPosition2d,
    PrefixBias,
    RelativePosition2d,
    RotaryEmbedding2d,
    SlopePosition2d,
)
from relvit.layers.positions import POSITIONS as NAMED
from relvit.layers.positions.base import Position, is_stretchable, needs_tokens, terms_of
from relvit.models import RelVisionTransformer
from relvit.models.retrofit.timm_attention import TimmRelativePlain
from relvit.ops import AxisTables, Channels, RelativeTerms, make_grid, num_tokens, patch_coords, relative_attention
from relvit.ops.terms import with_query_bias

LEARNED = {
    "tables": partial(RelativePosition2d, rel_terms="qkvb", max_distance=2),
    "joint": partial(RelativePosition2d, rel_terms="kb", max_distance=2, layout="joint", shared_heads=False),
    "xl": TransformerXLPosition2d,
    "fire": partial(FirePosition2d, threshold=1.0),
    "cpb": ContinuousPosition2d,
    "cpb, swin": partial(ContinuousPosition2d, mode="swin", window=(4, 3)),
    "pape": partial(ParabolicPosition2d, parabolas=5),
    "low-rank": LowRankPosition2d,
}
POSITIONS = LEARNED | {
    "slopes": SlopePosition2d,
    "euclidean": partial(SlopePosition2d, distance="euclidean"),
    "lookhere": LookHerePosition2d,
}
COMBINED = {
    "slopes+tables": {"slopes": SlopePosition2d, "tables": partial(RelativePosition2d, rel_terms="kv", max_distance=2)},
    "pape+tables": {
        "pape": partial(ParabolicPosition2d, parabolas=5),
        "tables": partial(RelativePosition2d, rel_terms="vb", max_distance=2),
    },
}
POSITIONS |= {name: partial(CombinedPosition2d, makers=makers) for name, makers in COMBINED.items()}
STRETCHED = [
    name
    for name, made in POSITIONS.items()
    if is_stretchable(made(4, 4)) and name not in ("tables", "joint", *COMBINED)
]


def build(name, *args, **options):
    """Build a layer with this position; LookHere needs four heads."""
    heads = 4 if name == "lookhere" else HEADS
    return layer(POSITIONS[name](DIM // heads, heads), *args, heads=heads, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POSITIONS)
def test_layers_attend_with_the_terms_pair_by_pair(name, layout):
    """Compare relvit's and retrofitted attention with the formula, computed with the layer's own projections."""
    grid, attn = LAYOUTS[layout], build(name)
    x, parameters = draw(2, num_tokens(grid), DIM), list(attn.parameters())
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
    q, terms = with_query_bias(q, terms_of(attn.position, x, grid, grid))
    expected = attn.proj(brute_force(q, k, v, terms, grid).transpose(1, 2).flatten(2))
    got = attn(x, grid)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    grads = (torch.autograd.grad(out.sin().sum(), parameters, materialize_grads=True) for out in (got, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)
    timms = build(name, TimmRelativePlain)
    timms.load_state_dict(attn.state_dict())
    torch.testing.assert_close(run(timms, x, grid), got, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in LEARNED if name != "cpb, swin"])
def test_zeros_are_plain_attention_and_every_parameter_learns(name):
    position = LEARNED[name](DIM // HEADS, HEADS, init_std=0.0, device="meta").to_empty(device="cpu")
    position.reset_parameters()
    attn, grid, x = layer(None), make_grid(3, 5, prefix=1), draw(2, 16, DIM)
    attn.position = position.double()
    torch.testing.assert_close(attn(x, grid), plain(attn)(x), rtol=0, atol=1e-6)
    optimizer = torch.optim.SGD(attn.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        attn(x, grid).square().sum().backward()
        optimizer.step()
    # FIRE's threshold has no effect and no gradient here, because the image is larger than the threshold.
    assert all(parameter.grad.any() for key, parameter in position.named_parameters() if key != "threshold")
    if hasattr(position, "no_weight_decay"):
        assert position.no_weight_decay() <= {key for key, _ in position.named_parameters()}


@pytest.mark.parametrize("name", LEARNED)
def test_weights_that_hooks_compute_at_each_call(name):
    """In pruning a hook multiplies each weight by its mask; here all masks are ones."""
    grid, x, outs = make_grid(3, 5, prefix=1), draw(2, 16, DIM), []
    for pruned in (False, True):
        attn = build(name)
        attn.prefix_bias = PrefixBias(HEADS).double()
        for part in (*attn.position.modules(), *attn.prefix_bias.modules()):
            for key, _ in [*part.named_parameters(recurse=False)] if pruned else ():
                prune.identity(part, key)
        with torch.no_grad():
            for parameter in (*attn.position.parameters(), *attn.prefix_bias.parameters()):
                parameter.add_(0.1)
        outs.append(attn(x, grid))
    torch.testing.assert_close(*outs, rtol=0, atol=1e-10)


def test_every_position_with_a_name_is_tested_here():
    named = {getattr(made, "func", made) for made in NAMED.values()} | {CombinedPosition2d}
    assert named == {getattr(made, "func", made) for made in POSITIONS.values()}


def test_a_position_without_init_std_keeps_its_own_initialisation():
    class Own(Position):
        def __init__(self, head_dim, num_heads, device=None, dtype=None):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.full((num_heads, 1), 3.0, device=device, dtype=dtype))

        def forward(self, grid):
            return RelativeTerms(bias=AxisTables(self.slope, self.slope))

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": DIM, "num_heads": HEADS, "depth": 1}
    position = RelVisionTransformer(position=Own, **sizes).blocks[0].attn.position
    position.reset_parameters()
    assert (position.slope == 3).all()


def test_a_position_may_have_terms_of_tokens_alone():
    class Own(Position):
        def terms(self, x, grid, key_grid):
            return RelativeTerms(channels=Channels(x[:, None, :, :1], x.new_ones(1, 1, num_tokens(key_grid), 1)))

    grid, x = make_grid(3, 5), draw(2, 15, DIM)
    attn = layer(Own())
    # A bias that is the same for all keys of a query does not change the weights.
    torch.testing.assert_close(attn(x, grid), plain(attn)(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", POSITIONS)
def test_half_precision_stays_near(name):
    grid, joint = make_grid(9, 13), name.startswith(("cpb", "joint", "euclidean", "lookhere"))
    x = draw(2, num_tokens(grid), DIM)
    for backend in ["gathered"] if joint else ["fused", "tiled"]:
        attn = build(name, backend=backend)
        expected = attn(x, grid).detach()
        atol = 0.05 * float(expected.abs().max())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = attn.float()(x.float(), grid).double()
        torch.testing.assert_close(got, expected, rtol=0, atol=atol)
        torch.testing.assert_close(attn.bfloat16()(x.bfloat16(), grid).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*POSITIONS, "rope"])
def test_queries_and_memory_on_grids_of_their_own(name):
    attn = layer(None) if name == "rope" else build(name)
    if name == "rope":
        attn.rope = RotaryEmbedding2d(DIM // HEADS, HEADS, "axial")
    # The queries are the last two rows of an image, and its first rows are the memory.
    whole, x = make_grid(5, 3), draw(2, 15, DIM)
    last = make_grid(5, 3, coords=torch.stack((torch.arange(6) // 3 + 3, torch.arange(6) % 3), dim=-1))
    got = attn(x[:, 9:], last, memory=x[:, :9], key_grid=whole)
    torch.testing.assert_close(got, attn(x, whole)[:, 9:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "low-rank"])
def test_offsets_to_queries_outside_the_grid_of_the_keys(name):
    """The keys are the first two of five rows, on a grid of two rows or, with coordinates, on the whole grid."""
    position, (x, *contents), whole = build(name).position, draw(4, 2, 15, DIM), make_grid(5, 3)
    q, k, v = (part.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in contents)
    if name == "lookhere":
        q, k, v = (part.unflatten(-1, (2, -1)).movedim(3, 2).flatten(1, 2) for part in (q, k, v))
    got, expected = (
        relative_attention(q, k[:, :, :6], v[:, :, :6], terms_of(position, x, whole, keys), whole, keys)
        for keys in (make_grid(2, 3), make_grid(5, 3, coords=patch_coords(make_grid(2, 3))))
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", STRETCHED)
def test_stretched_to_another_size(name):
    """At the trained size terms are equal bit by bit; at twice the size, the offset 2d has the trained term of d."""
    position, x = build(name).position, draw(1, 20, DIM)
    small, large = make_grid(4, 5), make_grid(8, 10)
    if needs_tokens(position):
        # These positions depend on tokens, so use the same tokens at twice the distances.
        large = large._replace(coords=2 * patch_coords(small))
    trained = terms_of(position, x, small, small)
    position.trained_grid = (4, 5)
    same, stretched = (terms_of(position, x, grid, grid) for grid in (small, large))
    if needs_tokens(position):
        one, same, other = (terms.channels.query @ terms.channels.key.mT for terms in (trained, same, stretched))
        assert torch.equal(one, same)
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)
        return
    assert all(map(torch.equal, same.bias, trained.bias))
    for one, other in zip(stretched.bias, trained.bias, strict=True):
        every_other = (slice(None), *[slice(1, None, 2)] * (one.dim() - 1))
        torch.testing.assert_close(one[every_other], other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "made",
    [
        partial(SlopePosition2d, 2, 12),
        partial(LookHerePosition2d, 2, 12, layer=(0, 2)),
        partial(RotaryEmbedding2d, 8, 2),
    ],
    ids=["slopes", "lookhere", "rope"],
)
def test_buffers_are_made_on_the_meta_device_and_filled_by_timm(made):
    position = made(device="meta", dtype=torch.float64)
    assert {buffer.dtype for buffer in position.buffers()} == {torch.float32}
    position = position.to_empty(device="cpu")
    for buffer in position.buffers():
        buffer.fill_(torch.nan)
    reinit_non_persistent_buffers(position)
    assert all(map(torch.equal, position.buffers(), made().buffers()))
    assert not list(position.parameters())
    assert position.state_dict() == {}
