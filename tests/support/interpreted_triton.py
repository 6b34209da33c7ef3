"""Tests of the backend 'triton' on the CPU against the reference; tests/ops/backends/test_triton.py runs this file.

Triton's interpreter is chosen by the environment variable TRITON_INTERPRET=1, which has an effect only if it is set
before Triton is imported. So these tests run in a new process.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from draws import assert_all_close, draw_case, draw_tables, gradients, leaves, relative_error, tables_of, with_tables

from relvit.ops import AxisTables, Channels, RelativeTerms, make_grid, relative_attention
from relvit.ops.backends.triton import launch

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")


def rounded(terms, contents, dtype=torch.float32):
    """Return contents in `dtype` with float32 tables, and the same numbers in float64: leaves and terms of both."""
    pairs = []
    for precision, of_tables in ((dtype, torch.float32), (torch.float64, torch.float64)):
        changed = with_tables(terms, lambda t, to=of_tables: t.detach().to(dtype).to(to).requires_grad_())
        pairs.append((leaves(*(t.detach().to(dtype).to(precision) for t in contents), changed), changed))
    return pairs


def compare(contents, terms, *grids, atol=(1e-5, 5e-5), **options):
    """Compare results and all gradients with the reference in float64."""
    (inputs, singles), (exact_inputs, exact_terms) = rounded(terms, contents)
    out = relative_attention(*inputs[:3], singles, *grids, backend="triton", **options)
    want = relative_attention(*exact_inputs[:3], exact_terms, *grids, backend="reference", **options)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol[0])
    cotangent = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = gradients(out, inputs, cotangent.float())
    assert_all_close([grad.double() for grad in got], gradients(want, exact_inputs, cotangent), atol=atol[1])


@pytest.mark.parametrize(
    ("size", "prefix", "which", "dim"),
    [
        ((3, 5), 1, "kvb", 20),
        ((2, 6), 0, "v", 16),
        ((2, 3), 2, "k", 32),
        ((2, 3), 1, "b", 20),
        ((2, 3), 1, "", 5),
        ((1, 1), 0, "kvb", 5),
        # These cases have several strips of columns, several tiles of rows, of queries and of prefix tokens, and a head
        # of 128.
        ((2, 18), 1, "kv", 16),
        ((5, 7), 33, "kvb", 40),
        ((4, 3), 1, "kv", 128),
        # These grids are one row or one column.
        ((1, 40), 1, "kv", 20),
        ((40, 1), 1, "kv", 20),
    ],
)
def test_equals_the_reference_with_gradients(size, prefix, which, dim):
    # The interpreter is slow, so use one sample if there are many tokens.
    batch = 2 if prefix + size[0] * size[1] < 40 else 1
    q, k, v, terms, grid = draw_case(*size, prefix, (2, 3), which, dim=dim, batch=batch)
    compare((q, k, v), terms, grid)


@pytest.mark.parametrize(
    ("size", "prefix", "which", "keys", "padded"),
    [
        # These cases have tiles of one row, in several strips of columns, with several tiles of prefix tokens; and
        # tiles of several rows.
        ((3, 18), 1, "kvb", 32, True),
        ((2, 18), 0, "kvb", 16, False),
        ((2, 40), 19, "kv", 64, True),
        ((3, 14), 1, "k", 16, False),
        ((3, 14), 1, "v", 16, True),
        ((5, 6), 1, "kvb", 32, False),
    ],
)
def test_tiles_of_few_rows(size, prefix, which, keys, padded, monkeypatch):
    monkeypatch.setattr(launch, "BLOCKS_OF_FLOAT32", launch.Blocks(16, keys, 4, 1, by_row=True))
    launch.constants.cache_clear()
    q, k, v, terms, grid = draw_case(*size, prefix, (2, 3), which, dim=16, batch=1)
    if padded:
        valid = torch.rand(1, size[0] * size[1], generator=torch.Generator().manual_seed(0)) < 0.7
        grid = grid._replace(valid=valid)
    compare((q, k, v), terms, grid)
    launch.constants.cache_clear()


# Test half of all combinations: with all terms each pair of operands occurs, with fewer terms one operand or two.
SCENES = [
    (which, operands)
    for number, which in enumerate(["", "k", "v", "b", "kv", "vb", "kvb"])
    for operands in itertools.product((False, True), repeat=3)
    if (number + sum(operands)) % 2 == 0 and (which == "kvb" or sum(operands) in (1, 2))
]


@pytest.mark.parametrize(("which", "operands"), SCENES, ids=str)
def test_random_scenes_with_and_without_each_operand(which, operands):
    """Fill memory before each run, so that numbers that a kernel fails to write are noticed."""
    rotated, extended, padded = operands
    generator = torch.Generator().manual_seed(len(which) + 8 * sum(operands))
    height, width, prefix = (int(torch.randint(low, 5, (), generator=generator)) for low in (1, 1, 0))
    # The scenes with all terms show that each operand is read for its own sample.
    batch = 2 if which == "kvb" else 1
    q, k, v, terms, grid = draw_case(height, width, prefix, which=which, dim=16, batch=batch)
    if padded:
        valid = torch.rand(batch, height * width, generator=generator) < 0.7
        valid[:, 0] = True
        grid = grid._replace(valid=valid)
    tokens, draw = q.shape[2], partial(torch.randn, generator=generator, dtype=torch.float64)
    extra = [draw(batch, 2, tokens, 16)] if rotated else []
    extra += [draw(batch, 1, tokens, 3), draw(batch, 1, tokens, 3)] if extended else []
    found = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        tables = with_tables(terms, lambda table, to=dtype: table.detach().to(to).requires_grad_())
        contents = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v, *extra)]
        rest = contents[3:]
        options = {"position_query": rest.pop(0)} if rotated else {}
        given = tables._replace(channels=Channels(*rest)) if extended else tables
        # PyTorch reuses freed memory, so new tensors contain these numbers until they are written.
        torch.full((2**16,), 1e6, dtype=dtype)
        out = relative_attention(*contents[:3], given, grid, backend=backend, **options)
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        found.append((out, gradients(out, [*contents, *tables_of(tables)], cotangent)))
    (out, grads), (want, want_grads) = found
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    assert_all_close([grad.double() for grad in grads], want_grads, atol=5e-5)


@pytest.mark.parametrize("bucketing", ["clip", "piecewise"])
def test_tables_per_head_values_of_another_width_and_other_strides(bucketing):
    q, k, _, terms, grid = draw_case(4, 5, 1, (5, 1), "kvb", "kvb", bucketing, dim=20)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, 2, 34, 21, generator=generator, dtype=torch.float64).mT
    terms = terms._replace(value=draw_tables(generator, (2, 2), 34, 2, True))
    compare((q.transpose(0, 1).contiguous().transpose(0, 1), k, v), terms, grid, scale=0.3)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-40])
def test_any_scale(scale):
    q, k, v, terms, grid = draw_case(2, 3, 1, which="kvb")
    compare((q, k, v), terms, grid, scale=scale, atol=(1e-5, 1e-4))


def test_queries_with_coordinates_and_a_key_grid_of_their_own():
    generator = torch.Generator().manual_seed(5)
    query_grid = make_grid(2, 3, 1)._replace(coords=torch.tensor([[-4, 2], [7, -1], [1, 9]]))
    valid = torch.tensor([[True] * 6, [True, False] * 3])
    key_grid = make_grid(3, 2, 2, valid=valid)
    q = torch.randn(2, 2, 4, 5, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 8, 5, generator=generator, dtype=torch.float64)
    terms = RelativeTerms(
        key=draw_tables(generator, (5, 2), 5, 2, False),
        value=draw_tables(generator, (3, 9), 5, 2, False),
        bias=draw_tables(generator, (3, 3), None, 2, False),
    )
    compare((q, k, v), terms, query_grid, key_grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_and_a_sample_of_padding_alone(dtype):
    q, k, v, terms, grid = draw_case(2, 3, which="kvb")
    grid = grid._replace(valid=torch.tensor([[True, False] * 3, [False] * 6]))
    for tokens in (k, v):
        tokens[0, :, 1] = torch.nan
    (inputs, singles), (exact_inputs, exact_terms) = rounded(terms, (q, k, v), dtype)
    out = relative_attention(*inputs[:3], singles, grid, backend="triton")
    want = relative_attention(*exact_inputs[:3], exact_terms, grid, backend="reference")
    assert out.dtype == dtype
    assert not out[1].any()
    assert relative_error(out, want) < 0.01
    got, exact = gradients(out, inputs, torch.ones_like(out)), gradients(want, exact_inputs, torch.ones_like(want))
    assert not any(grad[1].any() for grad in got[:3])
    # When the interpreter converts to bfloat16, it truncates; GPUs round.
    limit = 0.04 if dtype == torch.bfloat16 else 0.02
    assert all(relative_error(one, other) < limit for one, other in zip(got, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_at_most_twice_what_stock_attention_loses(dtype):
    q, k, v, terms, grid = draw_case(8, 9, 1, (7, 7), "kvb", dim=64, batch=1)
    terms = with_tables(terms, lambda table: 0.3 * table)
    (inputs, singles), (exact_inputs, exact_terms) = rounded(terms, (q, k, v), dtype)
    exact = relative_attention(*exact_inputs[:3], exact_terms, grid, backend="reference")
    cotangent = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    stock, stock_exact = (F.scaled_dot_product_attention(*leaf[:3]) for leaf in (inputs, exact_inputs))
    allowed = 2 * relative_error(stock, stock_exact)
    stock_grads = gradients(stock, inputs[:3], cotangent)
    pairs = zip(stock_grads, gradients(stock_exact, exact_inputs[:3], cotangent.double()), strict=True)
    allowed_in_gradient = 2 * max(relative_error(got, want) for got, want in pairs)
    if dtype == torch.bfloat16:
        # When the interpreter converts to bfloat16, it truncates; GPUs round.
        allowed, allowed_in_gradient = 2 * allowed, 2 * allowed_in_gradient

    out = relative_attention(*inputs[:3], singles, grid, backend="triton")
    assert relative_error(out, exact) < allowed
    got = gradients(out, inputs, cotangent)
    for one, want in zip(got, gradients(exact, exact_inputs, cotangent.double()), strict=True):
        # The gradient of a scalar per offset is a sum of large terms of either sign, which cancel.
        assert relative_error(one, want) < (2 if one.dim() == 1 else 1) * allowed_in_gradient


def test_autocast_empty_batches_and_second_derivatives():
    q, k, v, terms, grid = draw_case(2, 3, 1, which="kvb", dim=16)
    (inputs, singles), _ = rounded(terms, (q, k, v))
    want = relative_attention(*inputs[:3], singles, grid, backend="triton")
    want_grads = torch.autograd.grad(want.sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = relative_attention(*inputs[:3], singles, grid, backend="triton")
        grads = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(out, want)
    assert all(map(torch.equal, grads, want_grads))
    empty = relative_attention(q[:0].float(), k[:0].float(), v[:0].float(), singles, grid, backend="triton")
    assert empty.shape == (0, 2, 7, 16)
    out = relative_attention(*inputs[:3], singles, grid, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)


def test_large_logits():
    q, k, v, terms, grid = draw_case(2, 18, 1, which="kv", dim=16, batch=1)
    tables = AxisTables(*(100 * table for table in terms.key))
    compare((q, k, v), terms._replace(key=tables), grid, atol=(1e-3, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_free_channels(dtype):
    q, k, v, terms, grid = draw_case(2, 3, 1, which="kv")
    channels = Channels(*torch.randn(2, 1, 2, 7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    contents = (t.to(dtype) for t in (q, k, v))
    out = relative_attention(*contents, terms._replace(channels=channels), grid, backend="triton")
    want = relative_attention(q, k, v, terms._replace(channels=channels), grid, backend="reference")
    assert out.dtype == dtype
    assert relative_error(out, want) < (1e-5 if dtype == torch.float32 else 2e-3)
