"""A joint bias between rasters: tiles and masks that add it compared with the formula, with gradients."""

import pytest
import torch
from draws import assert_same, brute_force, draw_case, leaves, relative_error

from relvit.layers.prefix_bias import prefix_channels
from relvit.ops import JointTable, RelativeTerms, choose, num_tokens, relative_attention
from relvit.ops.attention import attend_projected
from relvit.ops.backends import tiled

BACKENDS = ("tiled", "fused")
# Tables may be larger or smaller than the raster needs; offsets beyond a smaller table use its edge.
CASES = [
    {"distance": (3, 3)},
    {"distance": (1, 2), "prefix": 2},
    {"distance": (2, 3), "prefix": 1, "bucketing": "piecewise"},
    {"distance": (2, 1), "prefix": 1, "per_head": ""},
]


@pytest.fixture(params=[1 << 20, 2 * 2 * 17 * 17, 1], ids=["all samples", "some", "some queries"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(tiled, "TILE_LOGITS", request.param)
    monkeypatch.setattr(tiled, "LEAST_QUERIES", 5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula_with_gradients(case, tiles):
    q, k, v, terms, grid = draw_case(4, 3, which="b", layout="joint", batch=3, **{"per_head": "b", **case})
    inputs, expected = leaves(q, k, v, terms), brute_force(q, k, v, terms, grid)
    for backend in BACKENDS:
        assert_same(relative_attention(q, k, v, terms, grid, backend=backend), expected, inputs, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "hidden"),
    [
        (CASES[0], "a sample's window"),
        (CASES[1], "later keys"),
        (CASES[2], "padding"),
        (CASES[2], "booleans"),
        (CASES[3], "numbers"),
    ],
    ids=str,
)
def test_what_is_hidden_equals_the_reference_with_gradients(case, hidden, tiles):
    q, k, v, terms, grid = draw_case(5, 4, which="b", layout="joint", batch=3, **{"per_head": "b", **case})
    generator, n, options = torch.Generator().manual_seed(1), num_tokens(grid), {}
    if hidden == "padding":
        grid = grid._replace(valid=torch.rand(3, 20, generator=generator) < 0.6)
    elif hidden == "booleans":
        options["attn_mask"] = torch.rand(3, 1, n, n, generator=generator) < 0.6
    elif hidden == "numbers":
        options["attn_mask"] = torch.randn(1, 2, n, n, generator=generator, dtype=q.dtype).requires_grad_()
    elif hidden == "later keys":
        options["is_causal"] = True
    elif hidden == "a sample's window":
        options["attn_mask"] = torch.randn(3, 1, 1, n, generator=generator, dtype=q.dtype)
    inputs = leaves(q, k, v, terms) + [mask for mask in options.values() if getattr(mask, "requires_grad", False)]
    expected, *found = (
        relative_attention(q, k, v, terms, grid, backend=backend, **options) for backend in ("reference", *BACKENDS)
    )
    for got in found:
        assert_same(got, expected, inputs, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_beside_separate_tables_dropout_and_another_grid_of_keys(backend, tiles):
    q, _, _, terms, grid = draw_case(4, 3, prefix=1, which="qkv", batch=2)
    _, k, v, joint, key_grid = draw_case(3, 5, prefix=2, which="b", per_head="b", layout="joint", batch=2)
    terms = terms._replace(bias=joint.bias)
    inputs = leaves(q, k, v, terms)
    got = relative_attention(q, k, v, terms, grid, key_grid, backend=backend)
    assert_same(got, brute_force(q, k, v, terms, grid, key_grid), inputs, atol=1e-11)
    dropped = []
    for _ in range(2):
        torch.manual_seed(3)
        dropped.append(relative_attention(q, k, v, terms, grid, key_grid, dropout_p=0.3, backend=backend))
    assert torch.equal(*dropped)
    assert not torch.equal(dropped[0], got)


def test_small_windows_take_stock_attention_with_a_mask():
    q, k, v, terms, grid = draw_case(7, 8, which="b", per_head="b", layout="joint", batch=3)
    assert choose(*leaves(q, k, v, terms)[:3], terms, grid)[::2] == ("fused", "N x N weights")
    assert choose(q, k, v, RelativeTerms(key=draw_case(7, 8, layout="joint")[3].key), grid).backend == "gathered"
    coords = torch.zeros(56, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"terms\.bias is a joint table: use 'gathered' or 'reference', not"):
        relative_attention(q, k, v, terms, grid._replace(coords=coords), backend="tiled")


FAST = [
    {},
    {"prefix": 2, "distance": (1, 4)},
    {"prefix": 1, "biased": True, "masked": True},
    {"prefix": 1, "biased": True, "bucketing": "piecewise", "per_head": ""},
]


@pytest.mark.parametrize("case", FAST, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_fewest_operations_equal_the_formula_with_gradients(case, packed):
    biased, masked = (case.get(name, False) for name in ("biased", "masked"))
    case = {"per_head": "b", **{name: value for name, value in case.items() if name not in ("biased", "masked")}}
    q, k, v, terms, grid = draw_case(4, 3, which="b", layout="joint", batch=3, **case)
    n, generator = num_tokens(grid), torch.Generator().manual_seed(1)
    weight = torch.randn(3, 2, generator=generator, dtype=q.dtype).requires_grad_() if biased else None
    mask = torch.randn(3, 1, n, n, generator=generator, dtype=q.dtype) if masked else None
    inputs = leaves(q, k, v, terms) + [weight] * biased
    of_all = terms if weight is None else terms._replace(channels=prefix_channels(weight, grid, grid))
    expected = relative_attention(q, k, v, of_all, grid, attn_mask=mask, backend="reference")
    projected = torch.cat((q, k, v), dim=1).transpose(1, 2) if packed else (q, k, v)
    # The second call uses the plan of the first call, although the first call was in inference mode.
    with torch.inference_mode():
        attend_projected(projected, terms, grid, q.shape[-1] ** -0.5, "auto", mask, weight)
    found = attend_projected(projected, terms, grid, q.shape[-1] ** -0.5, "auto", mask, weight)
    assert_same(found, expected.transpose(1, 2).flatten(2), inputs, atol=1e-12)


def test_sums_of_a_table_s_gradient_keep_its_precision():
    q, k, v, terms, grid = draw_case(6, 5, which="b", layout="joint", per_head="b", batch=2)
    table = terms.bias.table.float().requires_grad_()
    halves = [part.bfloat16() for part in (q, k, v)]
    out = attend_projected(tuple(halves), RelativeTerms(bias=JointTable(table)), grid, 0.5, "auto")
    assert out.dtype == torch.bfloat16
    # Under autocast norms return float32 queries and keys beside half-precision values.
    assert attend_projected((q, k, halves[2]), RelativeTerms(bias=JointTable(table)), grid, 0.5, "auto") is None
    (grad,) = torch.autograd.grad(out.float().square().sum(), table)
    exact = table.detach().double().requires_grad_()
    terms = RelativeTerms(bias=JointTable(exact))
    out = (
        relative_attention(*(part.double() for part in halves), terms, grid, scale=0.5, backend="reference")
        .transpose(1, 2)
        .flatten(2)
    )
    (expected,) = torch.autograd.grad(out.square().sum(), exact)
    assert (grad.double() - expected).norm() < 0.02 * expected.norm()


def test_tiles_divide_a_half_precision_table_by_the_scale_without_rounding():
    q, k, v, terms, grid = draw_case(6, 5, which="b", layout="joint", per_head="b")
    given, gradients = 10 * terms.bias.table.bfloat16(), []
    for dtype, backend in ((torch.bfloat16, "tiled"), (torch.float64, "reference")):
        inputs = [part.detach().bfloat16().to(dtype).requires_grad_() for part in (q, k, v)]
        terms = RelativeTerms(bias=JointTable(given.to(dtype)))
        out = relative_attention(*inputs, terms, grid, backend=backend)
        gradients.append(torch.autograd.grad((out * v.to(dtype)).sum(), inputs))
    for found, expected in zip(*gradients, strict=True):
        assert relative_error(found, expected) < 0.004
