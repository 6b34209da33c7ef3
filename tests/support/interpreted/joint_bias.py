"""Tests of the Triton kernels for a joint bias on the CPU, in a new process as interpreted_triton.py."""

import pytest
import torch
import torch.nn.functional as F
from draws import assert_all_close, draw, draw_case, gradients, relative_error, with_tables
from interpreted_triton import compare, rounded

from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.layers.prefix_bias import PrefixBias
from relvit.ops import JointTable, RelativeTerms, make_grid, relative_attention, to_windows
from relvit.ops.backends.triton.joint import joint_launch as launch

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")


def joint_case(height, width, prefix=0, distance=(3, 3), dim=16, per_head="b", **options):
    return draw_case(height, width, prefix, distance, "b", per_head, layout="joint", dim=dim, **options)


@pytest.mark.parametrize(
    ("size", "prefix", "case"),
    [
        ((3, 5), 1, {"distance": (2, 3), "dim": 20}),
        # All heads share the table, which has fewer offsets than the grid.
        ((5, 4), 2, {"distance": (2, 1), "per_head": "", "dim": 5}),
        ((4, 5), 0, {"distance": (1, 2), "bucketing": "piecewise"}),
        # The table has more offsets than the grid; there are several blocks of tokens and rectangles along each axis.
        ((2, 3), 1, {"distance": (3, 3)}),
        ((3, 18), 0, {"distance": (1, 3), "batch": 1}),
        ((19, 2), 17, {"distance": (3, 1), "batch": 1}),
        # The vectors of heads are computed in one part and in two parts.
        ((2, 3), 0, {"dim": 64}),
        ((2, 3), 1, {"dim": 80}),
        ((1, 1), 0, {"dim": 5}),
    ],
)
def test_equals_the_reference_with_gradients(size, prefix, case):
    q, k, v, terms, grid = joint_case(*size, prefix, **case)
    compare((q, k, v), terms, grid)


def test_key_grid_of_its_own_values_of_another_width_other_strides_and_scale():
    generator = torch.Generator().manual_seed(0)
    grid, key_grid = make_grid(3, 4, 1), make_grid(4, 2, 2)
    q, k = draw(generator, 2, 2, 13, 16), draw(generator, 2, 2, 10, 16)
    v = draw(generator, 2, 2, 34, 10).mT
    terms = RelativeTerms(bias=JointTable(draw(generator, 2, 7, 3)))
    compare((q.transpose(0, 1).contiguous().transpose(0, 1), k, v), terms, grid, key_grid, scale=-0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_a_sample_of_padding_alone_and_hidden_offsets(dtype):
    q, k, v, terms, grid = joint_case(2, 3, 0, (1, 2), per_head="")
    grid = grid._replace(valid=torch.tensor([[True, False] * 3, [False] * 6]))
    # LookHere hides offsets by this bias.
    terms.bias.table[0, 0] = -1e4
    for tokens in (k, v):
        tokens[0, :, 1] = torch.nan
    (inputs, singles), (exact_inputs, exact_terms) = rounded(terms, (q, k, v), dtype)
    out = relative_attention(*inputs[:3], singles, grid, backend="triton")
    want = relative_attention(*exact_inputs[:3], exact_terms, grid, backend="reference")
    assert out.dtype == dtype
    assert not out[1].any()
    limit = 1e-6 if dtype == torch.float32 else 0.01
    assert relative_error(out, want) < limit
    got, exact = gradients(out, inputs, torch.ones_like(out)), gradients(want, exact_inputs, torch.ones_like(want))
    assert not any(grad[1].any() for grad in got[:3])
    # When the interpreter converts to bfloat16, it truncates; GPUs round.
    limit *= 8
    assert all(relative_error(one, other) < limit for one, other in zip(got, exact, strict=True))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float16, 80)])
def test_half_precision_loses_at_most_twice_what_stock_attention_loses(dtype, dim):
    q, k, v, terms, grid = joint_case(8, 9, 1, (7, 7), dim=dim, batch=1)
    (inputs, singles), (exact_inputs, exact_terms) = rounded(terms, (q, k, v), dtype)
    exact = relative_attention(*exact_inputs[:3], exact_terms, grid, backend="reference")
    cotangent = draw(torch.Generator().manual_seed(1), *exact.shape).to(dtype)
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
        assert relative_error(one, want) < allowed_in_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefix_biases_as_channels_with_their_gradient(dtype):
    """The prefix biases are channels, as in BEiT: in half precision a head of 16 gets six, and is padded to 32."""
    q, k, v, terms, grid = joint_case(2, 3, 1)
    found = []
    for precision, backend in ((dtype, "triton"), (torch.float64, "reference")):
        tables = with_tables(terms, lambda table: table.detach().to(torch.float64).requires_grad_())
        biases = PrefixBias(2, dtype=torch.float64)
        with torch.no_grad():
            biases.weight.copy_(draw(torch.Generator().manual_seed(2), 3, 2))
        contents = [tensor.detach().to(dtype).to(precision).requires_grad_() for tensor in (q, k, v)]
        out = relative_attention(*contents, tables._replace(channels=biases(grid, grid)), grid, backend=backend)
        inputs = [*contents, tables.bias.table, biases.weight]
        found.append((out, gradients(out, inputs, torch.linspace(-1, 1, out.numel()).view(out.shape).to(precision))))
    (out, grads), (want, want_grads) = found
    assert out.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative_error(out, want) < limit
    assert all(relative_error(one, other) < limit for one, other in zip(grads, want_grads, strict=True))


def test_shifted_windows_of_a_layer():
    """Windows are samples of a batch, and windows at the border have padding."""
    torch.manual_seed(0)
    layer = RelativeAttention(32, 2, position=RelativePosition2d(16, 2, "b", (2, 1), layout="joint", init_std=0.5))
    tokens, grid = to_windows(torch.randn(1, 20, 32), make_grid(4, 5), (3, 2), (1, 1))
    found = []
    for backend in ("triton", "reference"):
        layer.backend = backend
        x = tokens.clone().requires_grad_()
        out = layer(x, grid)
        found.append((out, torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
    (out, grads), (want, want_grads) = found
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
    assert_all_close(grads, want_grads, atol=1e-4)


def test_parts_of_the_samples_and_memory_that_is_not_written(monkeypatch):
    """Fill memory before each run, so that numbers that a kernel fails to write are noticed."""
    monkeypatch.setattr(launch, "PROGRAMS", 1 << 10)
    q, k, v, terms, grid = joint_case(2, 5, 1, (1, 3), batch=3)
    torch.full((2**16,), 1e6, dtype=torch.float32)
    compare((q, k, v), terms, grid)


def test_nothing_of_all_pairs_is_kept_and_frozen_tables_take_no_pass(monkeypatch):
    q, k, v, terms, grid = joint_case(8, 9, 1, batch=1)
    (inputs, singles), _ = rounded(terms, (q, k, v))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = relative_attention(*inputs[:3], singles, grid, backend="triton")
    # Backward keeps queries, keys, values, the result, the log-sum-exp, the given table, and the table by offset with
    # zeros around it.
    assert sum(tensor.numel() for tensor in kept) <= 4 * q.numel() + 2 * 73 + 2 * (49 + 3 * 15 * 17)
    frozen = with_tables(singles, torch.Tensor.detach)
    monkeypatch.setattr(launch.Launch, "sums", None)
    alone = relative_attention(*inputs[:3], frozen, grid, backend="triton")
    assert torch.equal(out, alone)
    torch.autograd.grad(alone.sum(), inputs[:3])


def test_autocast_empty_batches_and_second_derivatives():
    q, k, v, terms, grid = joint_case(2, 3, 1)
    (inputs, singles), _ = rounded(terms, (q, k, v))
    want = relative_attention(*inputs[:3], singles, grid, backend="triton")
    want_grads = torch.autograd.grad(want.sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = relative_attention(*inputs[:3], singles, grid, backend="triton")
        grads = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(out, want)
    assert all(torch.equal(one, other) for one, other in zip(grads, want_grads, strict=True))
    empty = [tensor[:0].detach().float().requires_grad_() for tensor in (q, k, v)]
    out = relative_attention(*empty, singles, grid, backend="triton")
    assert out.shape == (0, 2, 7, 16)
    assert not torch.autograd.grad(out.sum(), singles.bias.table)[0].any()
    out = relative_attention(*inputs[:3], singles, grid, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)


def test_changes_in_place_are_refused():
    q, k, v, terms, grid = joint_case(2, 3)
    (inputs, singles), _ = rounded(terms, (q, k, v))
    for changed in inputs[:3]:
        out = relative_attention(*inputs[:3], singles, grid, backend="triton")
        with torch.no_grad():
            changed.zero_()
        with pytest.raises(RuntimeError, match="modified"):
            out.sum().backward()
