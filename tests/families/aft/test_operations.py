"""Attention-free operations compared with the equations number by number, with each other, and for extreme numbers."""

import pytest
import torch
from draws import assert_same, gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import aft as oracle
from torch.autograd import gradgradcheck

from relvit.families.aft import aft_conv, aft_full, aft_local, aft_simple, reference, sums
from relvit.families.aft import operations as api
from relvit.ops import Grid, make_grid

pytestmark = pytest.mark.usefixtures("several_tiles")

CONV = (*api.WINDOW_FORMS, "pairs", "auto")
# These backends are exact even for very small weights.
SAFE = [backend for backend in CONV if backend != "difference"]


def contents(grid, batch=2, heads=2, width=3, key_width=1, dtype=torch.float64, spread=2.0):
    torch.manual_seed(0)
    patches = grid.height * grid.width if grid.coords is None else grid.coords.shape[-2]
    sizes = (width, key_width, width)
    q, k, v = (torch.randn(batch, heads, grid.prefix + patches, size, dtype=torch.float64) for size in sizes)
    return [part.to(dtype).requires_grad_() for part in (q, spread * k, v)]


def window_of(heads, rows, cols, dtype=torch.float64):
    return torch.randn(heads, rows, cols, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def bias_of(grid, heads=None, dtype=torch.float64):
    places = grid.prefix + grid.height * grid.width
    shape = (places, places) if heads is None else (heads, places, places)
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()


def ways(q, k, v, weight, bias, grid):
    """Return the results of each operation by each backend, beside the result of its reference."""
    for operation, learned, backends in (("aft_conv", weight, CONV), ("aft_full", bias, ("products", "pairs"))):
        expected = getattr(reference, operation)(q, k, v, learned, grid)
        for backend in backends:
            yield getattr(api, operation)(q, k, v, learned, grid, backend=backend), expected
    for causal in (False, True):
        yield (module.aft_simple(q, k, v, grid, is_causal=causal) for module in (api, reference))


COORDS = torch.tensor([[[0, 1], [2, 3], [1, 0], [2, 2]], [[1, 3], [0, 0], [2, 1], [0, 2]]])
VALID = torch.tensor([[True, True, False, True], [False, True, True, False]])
GRIDS = [
    Grid(3, 2),
    Grid(1, 5),
    Grid(2, 3, 2),
    make_grid(3, 4, 1, COORDS),
    make_grid(3, 4, 0, COORDS[0]),
    make_grid(2, 2, 1, valid=VALID),
    make_grid(3, 4, 0, COORDS, VALID),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=range(len(GRIDS)))
def test_references_and_operations_equal_the_papers_equations(grid, causal):
    q, k, v = contents(grid, width=2)
    weight, bias = window_of(2, 3, 5).detach(), bias_of(grid, heads=2).detach()

    def number(place):
        return 0 if place is None else place[0] * grid.width + place[1] + grid.prefix

    cases = [
        ("aft_conv", (weight,), lambda h, i, j: oracle.conv_bias(weight, h, i, j)),
        ("aft_simple", (), lambda *pair: 0.0),
    ]
    # `number` gives every prefix token the row 0, so the grid may have one prefix token at most.
    if grid.prefix < 2:
        cases.append(("aft_full", (bias,), lambda h, i, j: float(bias[h, number(i), number(j)])))
    for operation, learned, w in cases:
        expected = oracle.aft(q, k, v, grid, w, causal)
        for module in (reference, api):
            got = getattr(module, operation)(q, k, v, *learned, grid, is_causal=causal)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_local_bias_ends_at_its_window():
    grid = Grid(4, 3, 1)
    q, k, v = contents(grid, heads=1, width=2)
    bias = bias_of(grid).detach()

    def near(h, i, j):
        if i is not None and j is not None and (abs(i[0] - j[0]) >= 2 or abs(i[1] - j[1]) >= 1):
            return 0.0
        return float(bias[tuple(0 if p is None else 1 + 3 * p[0] + p[1] for p in (i, j))])

    expected = oracle.aft(q, k, v, grid, near)
    for module in (reference, api):
        got = module.aft_local(q, k, v, bias, (2, 1), grid)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    full, simple = aft_full(q, k, v, bias, grid), aft_simple(q, k, v, grid)
    torch.testing.assert_close(aft_local(q, k, v, bias, 4, grid), full, rtol=0, atol=0)
    torch.testing.assert_close(aft_local(q, k, v, bias, 0, grid), simple, rtol=0, atol=1e-14)


@settings(max_examples=20, deadline=None)
@given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    prefix=st.integers(0, 2),
    rows=st.sampled_from([1, 3, 5, 13]),
    cols=st.sampled_from([1, 3, 5, 13]),
    heads=st.integers(1, 3),
    key_width=st.sampled_from([1, 3]),
    batch=st.integers(0, 3),
    layout=st.sampled_from(["raster", "dropped", "padded"]),
)
def test_all_ways_and_their_gradients_equal_the_reference(
    height, width, prefix, rows, cols, heads, key_width, batch, layout
):
    grid = Grid(height, width, prefix)
    if layout == "dropped" and height * width > 1:
        order = torch.stack([torch.randperm(height * width) for _ in range(max(1, batch))])[:batch, 1:]
        grid = grid._replace(coords=torch.stack((order // width, order % width), dim=-1))
    elif layout == "padded":
        grid = grid._replace(valid=torch.rand(batch, height * width) < 0.7)
    inputs = [*contents(grid, batch, heads, 3, key_width), window_of(heads, rows, cols), bias_of(grid)]
    for got, expected in ways(*inputs, grid):
        assert_same(got, expected, inputs, atol=1e-8)


@pytest.mark.parametrize("needed", [(0, 1, 2), (1, 2), (0,), (2,)])
def test_second_derivatives_also_where_only_some_inputs_have_gradients(needed):
    grid = make_grid(2, 2, 1, valid=torch.tensor([True, True, False, True]))
    inputs = contents(grid, batch=1, heads=1, width=2)
    for index in {0, 1, 2} - set(needed):
        inputs[index].requires_grad_(False)
    learned = len(needed) == 3
    cases = [(aft_full, bias_of(grid), by) for by in ("products", "pairs")]
    cases += [(aft_conv, window_of(1, 1, 3), by) for by in CONV if by != "auto"]
    for operation, table, backend in cases:
        call = lambda *given, run=operation, by=backend: run(*given, grid, backend=by)  # noqa: E731
        assert gradgradcheck(call, [*inputs, table.requires_grad_(learned)], fast_mode=True)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_keys_of_any_size_in_any_precision(dtype, spread):
    grid = Grid(5, 7, 1)
    q, k, v = (part.detach() for part in contents(grid, width=4, key_width=4, dtype=dtype, spread=spread))
    k = k.clamp(-1e4, 1e4)
    weight, bias = window_of(2, 5, 3, dtype).detach(), bias_of(grid, dtype=dtype).detach()
    for got, expected in ways(q, k, v, weight, bias, grid):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_products_in_bfloat16_as_on_gpus(monkeypatch):
    monkeypatch.setattr(sums, "HALF_PRODUCTS", {"cpu"})
    grid = Grid(5, 7, 1)
    for spread in (1.0, 1e4):
        inputs = contents(grid, width=4, dtype=torch.bfloat16, spread=spread)
        inputs += [window_of(2, 5, 3, torch.bfloat16), bias_of(grid, dtype=torch.bfloat16)]
        for got, expected in ways(*inputs, grid):
            assert (got - expected).norm() < 9e-3 * expected.norm()
            if spread == 1.0:
                for one, other in zip(*(gradients(out, inputs, expected) for out in (got, expected)), strict=True):
                    assert (one - other).norm() <= 1.8e-2 * other.norm()


def test_differences_keep_their_digits_in_bfloat16_as_on_gpus(monkeypatch):
    monkeypatch.setattr(sums, "HALF_PRODUCTS", {"cpu"})
    key, value = (torch.tensor(row).bfloat16().view(1, 1, 3, 1) for row in ([18.0, 18, 0], [1.0, 2, 3]))
    weight, query, grid = torch.linspace(-5, -4, 3).view(1, 1, 3), torch.zeros_like(key), Grid(1, 3)
    got = aft_conv(query, key, value, weight, grid, backend="difference")
    expected = reference.aft_conv(query, key, value, weight, grid)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[torch.bfloat16], atol=0)


@pytest.mark.parametrize("backend", SAFE)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weights_close_to_nothing_at_a_dominant_key_do_not_cancel(backend, dtype):
    """The paper's form, the convolution with exp(w) - 1 plus the sum over all tokens, is wrong by 0.3 here."""
    grid = Grid(1, 3)
    key, value = (torch.tensor(row, dtype=dtype).view(1, 1, 3, 1) for row in ([18.0, 0, 0], [1.0, 2, 3]))
    weight = torch.full((1, 1, 3), -20.0, dtype=dtype)
    query = torch.zeros_like(key)
    got = aft_conv(query, key, value, weight, grid, backend=backend)
    torch.testing.assert_close(got, reference.aft_conv(query, key, value, weight, grid), rtol=TOLERANCE[dtype], atol=0)


def test_differences_are_taken_where_they_do_not_cancel():
    """The worst case in which 'auto' takes 'difference': all weight is on a key with the lowest bias."""
    key, value = (torch.tensor(row).view(1, 1, 3, 1) for row in ([18.0, 0, 0], [1.0, 2, 3]))
    weight, query, grid = torch.full((1, 1, 3), -5.0), torch.zeros(1, 1, 3, 1), Grid(1, 3)
    got, expected = (run(query, key, value, weight, grid) for run in (aft_conv, reference.aft_conv))
    torch.testing.assert_close(got, expected, rtol=300 * 6e-8, atol=0)
    # With lower biases 'auto' takes another backend, and 'difference' is wrong.
    got, expected = (run(query, key, value, 4 * weight, grid) for run in (aft_conv, reference.aft_conv))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(aft_conv(query, key, value, 4 * weight, grid, backend="difference"), expected, rtol=0.1)


@pytest.mark.parametrize("size", [90.0, 1e4])
def test_biases_of_any_size_are_exact_by_choice(size):
    grid = Grid(4, 5)
    q, k, v = (part.detach() for part in contents(grid, spread=size / 2, key_width=3, dtype=torch.float32))
    weight, bias = size * window_of(2, 3, 3).detach().float(), size * bias_of(grid).detach().float()
    tolerance = {"rtol": 1e-4 * size / 90, "atol": 1e-4}
    torch.testing.assert_close(aft_conv(q, k, v, weight, grid), reference.aft_conv(q, k, v, weight, grid), **tolerance)
    torch.testing.assert_close(aft_full(q, k, v, bias, grid), reference.aft_full(q, k, v, bias, grid), **tolerance)
    # Other backends may be inexact here, but their results stay finite.
    for backend in api.WINDOW_FORMS:
        assert aft_conv(q, k, v, weight, grid, backend=backend).isfinite().all()
    assert aft_full(q, k, v, bias, grid, backend="products").isfinite().all()
    # If the window covers all pairs, no pair has the bias 0, so all biases may be far below 0.
    weight = window_of(2, 7, 9).detach().float() - 300
    expected = reference.aft_conv(q, k, v, weight, grid)
    for backend in ("convolution", "auto"):
        got = aft_conv(q, k, v, weight, grid, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_sample_without_a_valid_token_gets_zeros():
    grid = make_grid(2, 3, valid=torch.tensor([[True, False, True, True, False, True], [False] * 6]))
    q, k, v = contents(grid, key_width=3)
    with torch.no_grad():
        k[1], v[1] = torch.nan, torch.inf
    for out, _ in ways(q, k, v, window_of(2, 3, 3), bias_of(grid), grid):
        assert out[0].isfinite().all()
        assert (out[1] == 0).all()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert gradient.isfinite().all()
            assert (gradient[1] == 0).all()


def test_the_choice_of_a_backend(monkeypatch):
    taken = []
    window_sums = api.window_sums
    monkeypatch.setattr(api, "window_sums", lambda *given: taken.append(given[-1]) or window_sums(*given))

    def choice(height, width, scale=1.0, **options):
        grid = Grid(height, width)
        weight = scale * torch.linspace(-1, 1, 9, dtype=torch.float64).view(1, 3, 3)
        aft_conv(*contents(grid, 1, 1, 1), weight, grid, **options)
        return taken.pop() if taken else "pairs"

    assert choice(14, 14) == choice(3, 5, scale=5.0) == "difference"
    # With biases below -5 'difference' would lose digits. On one row the lowest bias is a quarter of the lowest of all.
    assert choice(14, 14, scale=5.1) == choice(1, 57, scale=20.4) == "convolution"
    assert choice(2, 2, is_causal=True) == choice(2, 2, scale=100.0) == "pairs"


def test_transforms_of_torch_func():
    grid = Grid(3, 4)
    q, k, v = (part.detach() for part in contents(grid))
    weight = window_of(2, 3, 3).detach()
    direction = torch.randn_like(k)
    expected = torch.autograd.functional.jvp(lambda k: reference.aft_conv(q, k, v, weight, grid), k, direction)[1]
    got = torch.func.jvp(lambda k: aft_conv(q, k, v, weight, grid), (k,), (direction,))[1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    many = torch.stack((weight, 2 * weight))
    got = torch.func.vmap(lambda w: aft_conv(q, k, v, w, grid))(many)
    torch.testing.assert_close(got[1], reference.aft_conv(q, k, v, many[1], grid), rtol=0, atol=1e-12)


def test_autocast_leaves_the_precision_alone():
    grid = Grid(4, 4)
    q, k, v = (part.detach() for part in contents(grid, dtype=torch.float32))
    weight, bias = window_of(2, 3, 3).detach().float(), bias_of(grid).detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, expected in ways(q, k, v, weight, bias, grid):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_errors():
    grid = Grid(2, 3)
    q, k, v = contents(grid)
    weight, bias = window_of(2, 3, 3), bias_of(grid)

    def conv(weight=weight, **options):
        return aft_conv(q, k, v, weight, grid, **options)

    cases = [
        (ValueError, "'convoluton'.*did you mean 'convolution'", lambda: conv(backend="convoluton")),
        (ValueError, r"weight has a window of 2 x 3, expected odd sizes", lambda: conv(weight[:, 1:])),
        (ValueError, r"weight has shape \(1, 3, 3\), expected \(2, rows", lambda: conv(weight[:1])),
        (ValueError, r"key has shape .*, expected \(2, 2, 6, 3\)", lambda: aft_simple(q, v[..., :2], v, grid)),
        (ValueError, r"bias has shape \(5, 6\), expected \(6, 6\)", lambda: aft_full(q, k, v, bias[1:], grid)),
        (ValueError, "that is 6 tokens, expected 8", lambda: aft_full(q, k, v, bias, Grid(2, 4))),
        (ValueError, "value has dtype torch.float32, expected the query's", lambda: aft_simple(q, k, v.float(), grid)),
        (ValueError, "'difference' has no causal form", lambda: conv(is_causal=True, backend="difference")),
        (TypeError, "window must hold integers", lambda: aft_local(q, k, v, bias, 1.5, grid)),
        (ValueError, "window must be at least 0", lambda: aft_local(q, k, v, bias, (1, -1), grid)),
        (TypeError, "query has dtype torch.int64", lambda: aft_simple(q.long(), k.long(), v.long(), grid)),
        (TypeError, "grid must be a Grid", lambda: aft_local(q, k, v, bias, 1, (2, 3))),
    ]  # fmt: skip
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
