"""Transformer-XL's positions: the layer compared with the paper's formula, pair by pair, in float64."""

import math

import pytest
import torch
from draws import all_places
from oracles import transformer_xl as oracle
from position_cases import DIM, HEADS, LAYOUTS, draw, layer
from torch import nn

from relvit.families.transformer_xl import TransformerXLPosition2d
from relvit.layers import RelativeAttention
from relvit.ops import AxisTables, RelativeTerms, make_grid, num_tokens, relative_attention


def build(cls=RelativeAttention, position=None, **options):
    return layer(TransformerXLPosition2d(DIM // HEADS, HEADS, **(position or {})), cls, std=1.0, **options)


def by_hand(attn, x, grid, **options):
    """Compute the layer by the oracle, with the layer's own projections."""
    q, k, v = attn.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).permute(2, 0, 3, 1, 4)
    q, k, position, places = attn.q_norm(q), attn.k_norm(k), attn.position, all_places(grid, len(x))
    projection = torch.cat((position.row_weight, position.col_weight), dim=1)
    out = oracle.attention(q, k, v, position.content_bias, position.position_bias, projection, places, **options)
    return attn.proj(out.transpose(1, 2).flatten(2))


GRIDS = LAYOUTS | {
    "a row": make_grid(1, 6, prefix=1),
    "padded": make_grid(2, 3, prefix=1, valid=torch.tensor([[True] * 6, [True, True, False, True, False, False]])),
}


@pytest.mark.parametrize("name", GRIDS)
def test_layer_equals_the_papers_formula_with_gradients(name):
    grid = GRIDS[name]
    attn = build(qk_norm=name == "raster", norm_layer=nn.LayerNorm)
    x = draw(2, num_tokens(grid), DIM)
    valid = None
    if grid.valid is not None:
        valid = torch.cat((torch.ones(2, grid.prefix, dtype=torch.bool), grid.valid), dim=1).tolist()
    parameters, cotangent = list(attn.parameters()), draw(*x.shape, seed=1)
    expected = by_hand(attn, x, grid, valid=valid)
    expected = [expected, *torch.autograd.grad(expected, parameters, cotangent)]
    for attn.backend in ("reference", "fused", "tiled", "gathered"):
        got = attn(x, grid)
        got = [got, *torch.autograd.grad(got, parameters, cotangent)]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("max_distance", [None, 2])
def test_stretched_offsets_are_those_in_trained_patches(max_distance):
    attn, grid = build(position={"max_distance": max_distance}), make_grid(4, 3, prefix=1)
    x, most = draw(1, num_tokens(grid), DIM), math.inf if max_distance is None else max_distance
    for attn.position.trained_grid, unit in (((3, 3), (3 / 4, 1)), ((4, 3), (1, 1))):
        torch.testing.assert_close(attn(x, grid), by_hand(attn, x, grid, unit=unit, most=most), rtol=0, atol=1e-10)


def test_biases_are_in_single_precision_under_autocast():
    attn, grid = build().float(), make_grid(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = attn.position(grid)
    assert (terms.key.rows.dtype, terms.bias.rows.dtype) == (torch.bfloat16, torch.float32)


def test_the_bias_of_queries_is_added_to_them():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 13, 4, dtype=torch.float64)
    table, u, v = torch.randn(2, 5, 4).double(), torch.randn(2, 4).double(), torch.randn(2, 1, 13, 4).double()
    grid, terms = make_grid(3, 4, prefix=1), RelativeTerms(AxisTables(table, table), AxisTables(-table, table))
    for rotated in ({}, {"position_query": query + v[:, 0], "position_key": key - 1}):
        biased = {name: t + u[:, None] if "query" in name else t for name, t in rotated.items()}
        expected = relative_attention(query + u[:, None], key, value, terms, grid, **biased, backend="gathered")
        given = (query, key, value, terms._replace(query_bias=u), grid)
        for backend in ("reference", "fused", "tiled", "gathered"):
            got = relative_attention(*given, **rotated, backend=backend)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
