"""Derivatives of relative attention: first and second, with masks and dropout, under transforms and autocast."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from draws import assert_same, draw_case, leaves, relative_error, tables_of, with_tables
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from relvit.ops import AxisTables, Channels, RelativeTerms, make_grid, relative_attention
from relvit.ops.backends import fused, gathered, tiled

pytestmark = pytest.mark.usefixtures("several_tiles")


def attending(terms, grid, **options):
    """Return `relative_attention` as a function of contents and tables, with the same dropout at each call."""

    def attend(q, k, v, *tables):
        torch.manual_seed(5)
        remaining = iter(tables)
        return relative_attention(q, k, v, with_tables(terms, lambda _: next(remaining)), grid, **options)

    return attend


@pytest.mark.parametrize("backend", ["auto", "gathered"])
def test_second_derivatives_exist_where_those_of_stock_attention_do(backend):
    q, k, v, terms, grid = draw_case(1, 2, prefix=1, distance=(1, 1), which="qkvb", dim=2, batch=1)
    with sdpa_kernel(SDPBackend.MATH):
        attend = attending(terms, grid, backend=backend)
        assert torch.autograd.gradgradcheck(attend, leaves(q, k, v, terms), fast_mode=True)


def test_tiles_refuse_second_derivatives_as_fused_kernels_do():
    q, k, v, terms, grid = draw_case(2, 3)
    out = relative_attention(*leaves(q, k, v, terms)[:3], terms, grid, backend="tiled")
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("backend", ["lean", "tiled", "fused", "gathered"])
def test_gradients_of_several_results_at_once_are_right_or_refused(backend):
    q, k, v, terms, grid = draw_case(2, 3)
    inputs = leaves(q, k, v, terms)
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    cotangents = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    grads = partial(torch.autograd.grad, out, inputs, retain_graph=True)
    for at_once in (partial(grads, is_grads_batched=True), torch.func.vmap(grads)):
        if backend in ("lean", "tiled"):
            with pytest.raises(RuntimeError, match=r"gradients of several results at once .* use backend='gathered'"):
                at_once(cotangents)
            continue
        found, each = at_once(cotangents), [grads(cotangent) for cotangent in cotangents]
        for one, expected in zip(found, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["lean", "tiled", "fused", "gathered"])
def test_saved_tensors_that_hooks_keep_in_a_larger_buffer(backend):
    q, k, v, terms, grid = draw_case(2, 3, which="kvb")
    inputs = leaves(q, k, v, terms)

    def pack(saved):
        return torch.cat((saved.new_zeros(7), saved.flatten())), saved.shape

    expected = relative_attention(q, k, v, terms, grid, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0][7:].view(packed[1])):
        got = relative_attention(q, k, v, terms, grid, backend=backend)
    assert_same(got, expected, inputs, 1e-12)


@pytest.mark.parametrize("which", ["", "b"])
def test_queries_and_keys_that_begin_at_one_address(which):
    """As where all images of a batch attend to the tokens of the first one: views that differ in strides alone."""
    x, _, _, terms, grid = draw_case(2, 3, which=which, layout="joint", dim=8)
    x.requires_grad_()
    for first in (x[:1], x[:, :1], x[:, :, :1]):
        of_first = first.expand_as(x)
        for contents in ((x, of_first, of_first), (of_first, x, x), (x, x, of_first)):
            outs = (relative_attention(*contents, terms, grid, backend=backend) for backend in ("fused", "reference"))
            assert_same(*outs, [x], 1e-10)


@pytest.mark.parametrize(("shape", "scale"), [((6, 6), None), ((2, 1, 1, 6), None), ((2, 2, 6, 6), 1e-5), ((6,), 0.0)])
def test_a_learned_mask_gets_its_gradient_whatever_its_shape_and_the_scale(shape, scale):
    q, k, v, terms, grid = draw_case(2, 3)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    outs = (
        relative_attention(q, k, v, terms, grid, attn_mask=mask, scale=scale, backend=backend)
        for backend in ("reference", "tiled")
    )
    expected, got = (torch.autograd.grad(out.square().sum(), mask)[0] for out in outs)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("backend", "layout"), [("tiled", "separate"), ("gathered", "separate"), ("gathered", "joint")]
)
def test_sums_over_many_tiles_are_rounded_once_in_half_precision(backend, layout, monkeypatch):
    for module in (tiled, gathered):
        monkeypatch.setattr(module, "LEAST_QUERIES", 1)
    q, k, v, terms, grid = draw_case(8, 12, which="qkvb", layout=layout, batch=4)
    mask = torch.randn(96, generator=torch.Generator().manual_seed(4))
    half = [part.bfloat16() for part in (q, k, v, *tables_of(terms), mask)]
    found = []
    for dtype, name in ((torch.float64, "reference"), (torch.bfloat16, backend)):
        *inputs, mask = (part.to(dtype).requires_grad_() for part in half)
        tables = iter(inputs[3:])
        terms = with_tables(terms, lambda _: next(tables))  # noqa: B023
        out = relative_attention(*inputs[:3], terms, grid, attn_mask=mask, backend=name)
        # The weights of the sum are positive, so that the gradients of all tiles have one sign.
        cotangent = torch.linspace(0, 1, out.numel()).view(out.shape).to(dtype)
        found.append(torch.autograd.grad(out, [*inputs, mask], cotangent))
    errors = [relative_error(one, other) for other, one in zip(*found, strict=True)]
    assert max(errors[3:]) < 0.004


def test_dropout_drops_in_backward_what_it_dropped_in_forward():
    q, k, v, terms, grid = draw_case(1, 5, distance=(1, 1), which="qkvb", dim=2, batch=1)
    inputs, attend = leaves(q, k, v, terms), attending(terms, grid, dropout_p=0.4, backend="tiled")
    assert not torch.equal(attend(*inputs), relative_attention(*inputs[:3], terms, grid))
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
def test_no_queries_give_keys_and_values_zero_gradients(backend):
    q, k, v, terms, grid = draw_case(2, 3, which="qkvb")
    k, v, nothing = k.requires_grad_(), v.requires_grad_(), make_grid(2, 3, coords=torch.zeros(0, 2, dtype=torch.int64))
    out = relative_attention(q[:, :, :0], k, v, terms, nothing, grid, backend=backend)
    assert out.shape == (2, 2, 0, 5)
    for grad in torch.autograd.grad(out.sum(), (k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


def transformed(name, attend, query):
    """Apply a transform of torch.func to `attend`, a function of queries (1, heads, N, dim)."""
    func = torch.func
    return {
        "vmap": lambda: func.vmap(lambda q: attend(q[None])[0])(query),
        "jvp": lambda: func.jvp(attend, (query[:1],), (query[1:],))[1],
        "vmap of grad": lambda: func.vmap(func.grad(lambda q: attend(q[None]).square().sum()))(query),
        "hessian": lambda: func.hessian(lambda q: attend(q).square().sum())(query[:1]),
    }[name]()


@pytest.mark.parametrize("name", ["vmap", "jvp", "vmap of grad", "hessian"])
@pytest.mark.parametrize("layout", ["separate", "joint"])
def test_every_transform_of_torch_func(name, layout):
    q, k, v, terms, grid = draw_case(2, 2, prefix=1, distance=(1, 1), which="qkvb", dim=3, layout=layout)
    got, expected = (
        transformed(name, lambda q: relative_attention(q, k[:1], v[:1], terms, grid, backend=backend), q)  # noqa: B023
        for backend in ("auto", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_compiled_joint_tables_equal_the_eager_ones():
    q, k, v, terms, grid = draw_case(3, 2, prefix=1, which="qkvb", layout="joint")
    inputs = leaves(q, k, v, terms)
    torch._dynamo.reset()
    compiled = torch.compile(relative_attention, fullgraph=True, backend="aot_eager")
    got, expected = (attend(q, k, v, terms, grid) for attend in (compiled, relative_attention))
    assert_same(got, expected, inputs, atol=1e-10)


def test_recomputed_gradients_are_bit_equal_to_those_with_everything_kept(monkeypatch):
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which="qkvb")
    inputs = leaves(q, k, v, terms)
    run = lambda q=q: relative_attention(q, k, v, terms, grid, backend="fused").square().sum()  # noqa: E731
    out = run()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs)
    # `torch.func` forbids saved-tensor hooks, so recomputation is off there.
    transformed = torch.func.grad(run)(q.detach())
    monkeypatch.setattr(fused, "recompute_saved", lambda *arguments: nullcontext())
    kept = torch.autograd.grad(run(), inputs)
    for one, again, expected in zip(first, second, kept, strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(again, expected)
    torch.testing.assert_close(transformed, kept[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_forward_and_backward(backend, dtype):
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which="qkvb", dim=16)
    terms = with_tables(terms, torch.Tensor.float)
    inputs = leaves(*(t.to(dtype) for t in (q, k, v)), terms)
    expected = relative_attention(*inputs[:3], terms, grid, backend="reference").float()
    expected_grads = torch.autograd.grad(expected.sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = relative_attention(*inputs[:3], terms, grid, backend=backend)
        grads = torch.autograd.grad(out.float().sum(), inputs)
    assert out.dtype == dtype
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert relative_error(got, want) < 0.05


@pytest.mark.parametrize("difficulty", ["padding", "a low bias", "large channels"])
def test_single_precision_under_autocast_to_float16_stays_finite(difficulty):
    q, k, v, terms, grid = draw_case(4, 3, which="kb", dim=64, per_head="b")
    terms = with_tables(terms, torch.Tensor.float)
    if difficulty == "padding":
        grid = grid._replace(valid=torch.arange(12) < 9)
    elif difficulty == "a low bias":
        terms.bias.rows[:, 0] = -1e4
    else:
        # `ParabolicPosition2d` has such channels: squared coordinates of keys, and small numbers of queries.
        place = torch.arange(12.0).view(1, 1, 12, 1)
        terms = terms._replace(channels=Channels(1e-3 * place, 1e3 * place**2))
    inputs = leaves(*(part.float() for part in (q, k, v)), terms)
    expected = relative_attention(*inputs[:3], terms, grid, backend="reference")
    with torch.autocast("cpu", torch.float16):
        out = relative_attention(*inputs[:3], terms, grid, backend="fused")
    assert out.dtype == torch.float32
    grads = (torch.autograd.grad(result.square().sum(), inputs) for result in (out, expected))
    for got, want in zip((out, *next(grads)), (expected, *next(grads)), strict=True):
        assert relative_error(got, want) < 0.01


@pytest.mark.slow
def test_compiled_vmap_and_one_table_for_both_axes():
    grid, table, queries = make_grid(3, 2, prefix=1), torch.randn(5, 8, requires_grad=True), torch.randn(2, 2, 7, 8)

    def attend(q):
        terms = RelativeTerms(key=AxisTables(table, table), value=AxisTables(table, table))
        return relative_attention(q, q, q, terms, grid, backend="fused")

    def step(function):
        out = function(queries)
        return out, torch.autograd.grad(out.square().sum(), table)[0]

    for got, expected in zip(
        step(torch.compile(attend, fullgraph=True, backend="aot_eager")), step(attend), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    mapped = torch.func.vmap(lambda q: attend(q[None])[0])
    compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(queries), attend(queries), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled_in_half_precision_is_as_close_to_the_formula_as_eager():
    q, k, v, terms, grid = draw_case(3, 5, prefix=1, distance=(1, 2), which="kvb", per_head="b", dim=8)
    expected = attended_with_gradients(relative_attention, leaves(q, k, v, terms), terms, grid, backend="reference")
    half = [part.detach().bfloat16().requires_grad_() for part in leaves(q, k, v, terms)]
    torch._dynamo.reset()
    # This backend has the partitioner and the decompositions of the default compiler, but generates no code.
    compiled = torch.compile(relative_attention, fullgraph=True, backend="aot_eager_decomp_partition")
    for attend in (relative_attention, compiled):
        found = attended_with_gradients(attend, half, terms, grid)
        assert found[0].dtype == torch.bfloat16
        assert max(relative_error(got, want) for got, want in zip(found, expected, strict=True)) < 0.015


def attended_with_gradients(attend, inputs, terms, grid, **options):
    """Compute the output, and the gradients of queries, keys, values and all tables."""
    tables = iter(inputs[3:])
    out = attend(*inputs[:3], with_tables(terms, lambda _: next(tables)), grid, **options)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


class SumsByIndex(TorchDispatchMode):
    """Record the dtypes in which operations add up numbers that belong to the same index."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__.rstrip("_") in ("scatter_add", "index_add", "index_put"):
            self.dtypes.append(args[0].dtype)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("backend", "which", "layout"),
    [
        ("fused", "qkvb", "separate"),
        ("fused", "b", "joint"),
        ("lean", "kv", "separate"),
        ("lean", "b", "separate"),
        ("tiled", "qkvb", "separate"),
        ("gathered", "qkvb", "joint"),
    ],
)
def test_sums_by_index_are_never_in_half_precision_which_gpus_round_after_each_addition(backend, which, layout):
    q, k, v, terms, grid = draw_case(2, 3, prefix=1, which=which, layout=layout, dim=8)
    q, k, v = (part.bfloat16() for part in (q, k, v))
    terms = with_tables(terms, torch.Tensor.bfloat16)
    inputs = leaves(q, k, v, terms)
    with SumsByIndex() as sums:
        out = relative_attention(*inputs[:3], terms, grid, backend=backend)
        grads = torch.autograd.grad(out.float().square().sum(), inputs)
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    assert torch.float32 in sums.dtypes or backend == "tiled"
    assert torch.bfloat16 not in sums.dtypes
