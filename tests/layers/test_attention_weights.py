"""Weights of an attention layer compared with brute force."""

import pytest
import torch
from draws import brute_force, draw, draw_case

from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.layers import attention_weights as module
from relvit.ops import key_mask, make_grid, num_tokens
from relvit.ops.inputs import AttentionInputs


def attention_weights(q, k, terms, grid, **options):
    return module.attention_weights(AttentionInputs(q, k, k, terms, grid, **options))


def by_hand(q, k, terms, grid, **options):
    """Compute the average of unit vectors, which is the vector of the weights."""
    units = torch.eye(num_tokens(grid), dtype=torch.float64).expand(*q.shape[:2], -1, -1)
    return brute_force(q, k, units, terms._replace(value=None), grid, **options)


def some_grid(kind, prefix):
    """Make a grid of 2 x 5 patches: with all patches, some patches of each sample, or padding in one sample."""
    if kind == "all":
        return make_grid(2, 5, prefix)
    generator = torch.Generator().manual_seed(1)
    kept = torch.stack([torch.randperm(10, generator=generator)[:7] for _ in range(2)])
    valid = torch.arange(7) < torch.tensor([[7], [4]]) if kind == "padded" else None
    return make_grid(2, 5, prefix, coords=torch.stack((kept // 5, kept % 5), dim=-1), valid=valid)


@pytest.mark.parametrize("kind", ["all", "some", "padded"])
@pytest.mark.parametrize(
    ("layout", "bucketing", "prefix"), [("separate", "clip", 4), ("separate", "piecewise", 0), ("joint", "clip", 4)]
)
def test_equals_brute_force(kind, prefix, layout, bucketing):
    _, _, _, terms, _ = draw_case(2, 5, which="qkvb", per_head="kb", layout=layout, bucketing=bucketing)
    grid = some_grid(kind, prefix)
    q, k, position_q, position_k = draw(torch.Generator().manual_seed(0), 4, 2, 2, num_tokens(grid), 5)
    options = {"scale": 0.7, "position_query": position_q, "position_key": position_k}
    weights = attention_weights(q, k, terms, grid, **options)
    valid = None if grid.valid is None else key_mask(grid).tolist()
    torch.testing.assert_close(weights, by_hand(q, k, terms, grid, valid=valid, **options), rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_masks_and_causal_attention():
    q, k, _, terms, grid = draw_case(2, 5, prefix=2, which="kvb")
    mask = draw(torch.Generator().manual_seed(3), 2, 2, 12, 12)
    want = by_hand(q, k, terms, grid, mask=mask)
    torch.testing.assert_close(attention_weights(q, k, terms, grid, attn_mask=mask), want, rtol=0, atol=1e-12)
    earlier = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1).expand(2, 2, -1, -1)
    want = by_hand(q, k, terms, grid, mask=earlier)
    torch.testing.assert_close(attention_weights(q, k, terms, grid, is_causal=True), want, rtol=0, atol=1e-12)


def test_half_precision_is_computed_in_single_precision():
    q, k, _, terms, grid = draw_case(3, 4, which="kb")
    q, k = q.bfloat16(), k.bfloat16()
    want = attention_weights(q.double(), k.double(), terms, grid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention_weights(q, k, terms, grid)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), want, rtol=0, atol=1e-6)


def test_hooks_on_attn_drop_get_the_weights_with_padding():
    torch.manual_seed(0)
    position = RelativePosition2d(6, 2, rel_terms="kb", max_distance=(1, 2), init_std=1.0)
    layer = RelativeAttention(12, 2, position=position).double().eval()
    grid = some_grid("padded", prefix=2)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    alone = layer(x, grid)
    shown = []
    handle = layer.attn_drop.register_forward_hook(lambda _module, _given, out: shown.append(out))
    torch.testing.assert_close(layer(x, grid), alone, rtol=0, atol=0)
    handle.remove()
    layer(x, grid)
    (weights,) = shown
    assert not weights[1, :, :, 6:].any()
    value = (x @ layer.qkv.weight[24:].T).unflatten(-1, (2, 6)).transpose(1, 2)
    torch.testing.assert_close(layer.proj((weights @ value).transpose(1, 2).flatten(2)), alone, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_without_hooks_and_in_compiled_layers_no_weights_are_computed(monkeypatch):
    computed = []
    monkeypatch.setattr(module, "attention_weights", lambda inputs: computed.append(inputs) or inputs.query)
    layer = RelativeAttention(12, 2, position=RelativePosition2d(6, 2)).eval()
    x, grid = torch.randn(1, 6, 12), make_grid(2, 3)
    layer.attn_drop.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x, grid)
        assert computed == []
        torch.testing.assert_close(compiled, layer(x, grid))
        assert len(computed) == 1
        layer.attn_drop._forward_hooks.clear()
        layer(x, grid)
    assert len(computed) == 1
