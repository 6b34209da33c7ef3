"""Transformer-XL's positions: the layer against the paper's formula, pair by pair, in float64."""

import math

import pytest
import torch
from draws import all_places
from oracles import transformer_xl as oracle
from timm.layers import Attention
from torch import nn

from relvit.layers import RelativeAttention, TransformerXLPosition2d
from relvit.layers.timm_attention import GridArgument, TimmRelativePlain
from relvit.ops import make_grid, num_tokens

DIM, HEADS = 8, 2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(cls=RelativeAttention, std=1.0, **options):
    """Attention whose parameters are all drawn, without projections that would hide the operation."""
    position = TransformerXLPosition2d(DIM // HEADS, HEADS, **options.pop("position", {}))
    if cls is RelativeAttention:
        attn = RelativeAttention(DIM, HEADS, position=position, norm_layer=nn.LayerNorm, **options).double()
    else:
        attn = Attention(DIM, HEADS, **options).double()
        attn.__class__, attn.position, attn.backend = cls, position.double(), "auto"
    torch.manual_seed(0)
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return attn.eval()


def by_hand(attn, x, grid, key_grid=None, memory=None, **options):
    """The layer by the oracle, between the layer's own projections."""
    tokens = x if memory is None else torch.cat((memory, x), dim=1)
    q, k, v = attn.qkv(tokens).unflatten(-1, (3, HEADS, DIM // HEADS)).permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q[:, :, -x.shape[1] :]), attn.k_norm(k)
    position, batch = attn.position, len(x)
    projection = torch.cat((position.row_weight, position.col_weight), dim=1)
    if key_grid is not None:
        options["key_places"] = all_places(key_grid, batch)
    places = all_places(grid, batch)
    out = oracle.attention(q, k, v, position.content_bias, position.position_bias, projection, places, **options)
    return attn.proj(out.transpose(1, 2).flatten(2))


LAYOUTS = {
    "raster": make_grid(3, 5),
    "prefix": make_grid(5, 2, prefix=2),
    "a row": make_grid(1, 6, prefix=1),
    "permuted": make_grid(3, 5, coords=torch.stack((torch.randperm(15) % 3, torch.randperm(15) % 5), dim=-1)),
    "dropped, by sample": make_grid(
        4, 6, prefix=1, coords=torch.tensor([[[3, 5], [0, 1], [2, 2]], [[0, 0], [3, 0], [1, 4]]])
    ),
    "padded": make_grid(2, 3, prefix=1, valid=torch.tensor([[True] * 6, [True, True, False, True, False, False]])),
}


@pytest.mark.parametrize("backend", ["reference", "fused", "tiled", "gathered"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layer_equals_the_papers_formula_with_gradients(name, backend):
    grid = LAYOUTS[name]
    attn = layer(qkv_bias=True, qk_norm=name == "raster", backend=backend)
    x = draw(2, num_tokens(grid), DIM)
    valid = None
    if grid.valid is not None:
        valid = torch.cat((torch.ones(2, grid.prefix, dtype=torch.bool), grid.valid), dim=1).tolist()
    got, expected = attn(x, grid), by_hand(attn, x, grid, valid=valid)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    cotangent = draw(*got.shape, seed=1)
    grads = [torch.autograd.grad(out, list(attn.parameters()), cotangent) for out in (got, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_queries_and_memory_on_grids_of_their_own():
    key_grid = make_grid(5, 3)
    grid = make_grid(5, 3, coords=torch.stack((torch.arange(6) // 3 + 3, torch.arange(6) % 3), dim=-1))
    attn, memory, x = layer(qkv_bias=True), draw(2, 9, DIM), draw(2, 6, DIM, seed=1)
    got = attn(x, grid, memory=memory, key_grid=key_grid)
    torch.testing.assert_close(got, by_hand(attn, x, grid, key_grid, memory), rtol=0, atol=1e-10)


@pytest.mark.parametrize("max_distance", [None, 2])
def test_stretched_offsets_are_those_in_trained_patches(max_distance):
    attn, grid = layer(position={"max_distance": max_distance}), make_grid(6, 5, prefix=1)
    attn.position.trained_grid = (4, 5)
    x, most = draw(1, num_tokens(grid), DIM), math.inf if max_distance is None else max_distance
    torch.testing.assert_close(attn(x, grid), by_hand(attn, x, grid, unit=(4 / 6, 1), most=most), rtol=0, atol=1e-10)
    attn.position.trained_grid = (6, 5)
    torch.testing.assert_close(attn(x, grid), by_hand(attn, x, grid, most=most), rtol=0, atol=1e-10)


def test_attention_of_retrofitted_models():
    attn, grid = layer(TimmRelativePlain, qkv_bias=True), make_grid(3, 5, prefix=1)
    x = draw(2, num_tokens(grid), DIM)
    got = attn(x, attn_mask=GridArgument(grid, None))
    torch.testing.assert_close(got, by_hand(attn, x, grid), rtol=0, atol=1e-10)


def test_zeros_are_plain_attention_and_every_parameter_learns():
    attn = RelativeAttention(DIM, HEADS, position=TransformerXLPosition2d(DIM // HEADS, HEADS, init_std=0)).double()
    plain, x, grid = Attention(DIM, HEADS).double(), draw(2, 16, DIM), make_grid(3, 5, prefix=1)
    plain.load_state_dict({name: tensor for name, tensor in attn.state_dict().items() if "position" not in name})
    torch.testing.assert_close(attn(x, grid), plain(x), rtol=0, atol=1e-12)
    optimizer = torch.optim.SGD(attn.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        attn(x, grid).square().sum().backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in attn.position.parameters())


def test_half_precision_stays_near():
    attn, grid = layer(std=0.5, qkv_bias=True).float(), make_grid(9, 13)
    x = draw(2, num_tokens(grid), DIM).float()
    expected = attn(x, grid).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = attn.position(grid)
        assert (terms.key.rows.dtype, terms.bias.rows.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(attn(x, grid).float(), expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    halves = attn.bfloat16()(x.bfloat16(), grid).float()
    torch.testing.assert_close(halves, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_distance": -1}, ValueError, "max_distance must be at least 0, got -1"),
        ({"max_distance": (1, 2.0)}, TypeError, "max_distance must hold integers"),
        ({"init_std": -1}, ValueError, "init_std must not be negative, got -1"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        TransformerXLPosition2d(4, 2, **arguments)
