"""The backend `lean`: random inputs, packed projections, memory, autocast, cached decisions, GPU kernels."""

import weakref

import pytest
import torch
from draws import assert_right_or_refused, assert_same, draw_case, leaves, relative_error, with_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from relvit.ops import AxisTables, RelativeTerms, attention, make_grid, relative_attention
from relvit.ops import grid as grids
from relvit.ops.attention import attend_projected
from relvit.ops.backends import axis_logits, lean, stock
from relvit.ops.backends.fused import one_hot
from relvit.ops.grid import MOST_RESULTS, Remembered
from relvit.ops.inputs import AttentionInputs, checked
from relvit.utils.memory import allocations

DISTANCES = st.tuples(st.sampled_from([0, 1, 2, 40]), st.sampled_from([0, 1, 2, 40]))


@settings(max_examples=80, deadline=None)
@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    prefix=st.integers(0, 2),
    distance=DISTANCES,
    of_values=DISTANCES,
    which=st.sampled_from(["k", "v", "b", "kv", "kb", "vb", "kvb"]),
    per_head=st.sampled_from(["", "b", "kv", "kvb"]),
    bucketing=st.sampled_from(["clip", "piecewise"]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_reference_with_gradients_packed_or_not(
    size, prefix, distance, of_values, which, per_head, bucketing, seed
):
    q, k, v, terms, grid = draw_case(*size, prefix, distance, which, per_head, bucketing, seed=seed)
    if terms.value is not None:
        _, _, _, others, _ = draw_case(*size, prefix, of_values, which, per_head, bucketing, seed=seed + 1)
        terms = terms._replace(value=others.value)
    inputs = leaves(q, k, v, terms)
    expected = relative_attention(q, k, v, terms, grid, backend="reference")
    assert_same(relative_attention(q, k, v, terms, grid, backend="lean"), expected, inputs, 1e-10)
    packed = torch.cat([part.transpose(1, 2) for part in (q, k, v)], dim=2)
    assert_same(
        attend_projected(packed, terms, grid, 0.3, "lean").unflatten(2, (2, 5)).transpose(1, 2),
        relative_attention(q, k, v, terms, grid, scale=0.3, backend="reference"),
        inputs,
        1e-10,
    )
    with torch.no_grad():
        out = attend_projected(packed, terms, grid, 5**-0.5, "lean")
        torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2))


def test_empty_batches():
    _, _, _, terms, grid = draw_case(3, 2, prefix=1, which="kvb")
    packed = torch.zeros(0, 7, 6, 5, dtype=torch.float64, requires_grad=True)
    out = attend_projected(packed, terms, grid, 0.3, "auto")
    assert out.shape == (0, 7, 10)
    assert torch.autograd.grad(out.sum(), packed)[0].shape == packed.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_the_general_way(dtype):
    q, k, v, terms, grid = draw_case(5, 4, prefix=1, distance=(1, 2), which="kvb", dim=32)
    inputs, errors = leaves(q, k, v, terms), {}
    expected = torch.autograd.grad(relative_attention(q, k, v, terms, grid).square().sum(), inputs)
    for backend in ("lean", "fused"):
        low = [part.to(dtype) for part in (q, k, v)]
        # The tables stay in float32, as parameters do under autocast.
        out = relative_attention(*low, with_tables(terms, torch.Tensor.float), grid, backend=backend)
        assert out.dtype == dtype
        found = torch.autograd.grad(out.float().square().sum(), inputs)
        errors[backend] = torch.tensor([relative_error(*pair) for pair in zip(found, expected, strict=True)])
    assert (errors["lean"] < 1.3 * errors["fused"] + 1e-3).all()


@pytest.mark.parametrize("changed", ["q", "k", "v", "output"])
def test_contents_that_are_changed_in_place_before_backward_are_refused(changed):
    q, k, v, terms, grid = draw_case(2, 3, prefix=1, which="kvb")
    contents = dict(zip("qkv", leaves(q, k, v, terms)[:3], strict=True))
    operation = lambda given: relative_attention(*given.values(), terms, grid, backend="lean")  # noqa: E731
    assert_right_or_refused(contents, operation, changed)


def test_second_derivatives_are_refused():
    q, k, v, terms, grid = draw_case(2, 3)
    out = relative_attention(*leaves(q, k, v, terms)[:3], terms, grid, backend="lean")
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("which", ["k", "v", "b", "kvb"])
def test_what_inference_mode_has_made_serves_training(which, monkeypatch):
    monkeypatch.setattr(attention, "_DECISIONS", Remembered())
    q, k, v, terms, grid = draw_case(3, 2, prefix=1, which=which)
    inputs = leaves(q, k, v, terms)
    with torch.inference_mode():
        expected = relative_attention(q, k, v, terms, grid, backend="lean").clone()
    out = relative_attention(q, k, v, terms, grid, backend="lean")
    assert torch.equal(out, expected)
    assert all(gradient is not None for gradient in torch.autograd.grad(out.sum(), inputs, allow_unused=True)[2:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_made_without_gradients_has_a_kernel_for_training(mode, monkeypatch):
    asked, choice = [], torch._fused_sdp_choice

    def spy(query, *others):
        asked.append(query.requires_grad and torch.is_grad_enabled())
        return choice(query, *others)

    monkeypatch.setattr(torch, "_fused_sdp_choice", spy)
    inputs = AttentionInputs(*draw_case(2, 3))
    with mode():
        lean.plan_of(checked(inputs))
        assert lean.refusal(checked(inputs)) is None
    assert set(asked) == {True}


@pytest.mark.parametrize("which", ["k", "v", "kv", "kvb"])
def test_keeps_no_more_than_the_general_way(which):
    q, k, v, terms, grid = draw_case(9, 14, prefix=1, which=which, dim=32)
    leaves(q, k, v, terms)
    kept = {}
    for backend in ("lean", "fused"):
        attend = lambda backend=backend: relative_attention(q, k, v, terms, grid, backend=backend)  # noqa: E731
        attend()
        out = []
        kept[backend] = sum(allocations(lambda attend=attend, out=out: out.append(attend())))
    assert kept["lean"] <= kept["fused"]


def test_without_gradients_the_largest_tensor_is_augmented_keys_and_values():
    q, k, v, terms, grid = draw_case(9, 14, dim=32)
    attend = lambda: relative_attention(q, k, v, terms, grid, backend="lean")  # noqa: E731
    with torch.no_grad():
        attend()
        assert max(allocations(attend)) <= 2 * 2 * 126 * 56 * 8


def test_where_grids_are_large_logits_and_indicators_are_copied_once(monkeypatch):
    q, k, v, terms, grid = draw_case(9, 14, dim=32)
    packed, results, sizes = torch.cat([part.transpose(1, 2) for part in (q, k, v)], dim=2), [], []
    attend = lambda: attend_projected(packed, terms, grid, 0.3, "lean")  # noqa: E731
    with torch.no_grad():
        for most in (lean.MOST_COPIED, 0):
            monkeypatch.setattr(lean, "MOST_COPIED", most)
            attention._DECISIONS.clear()
            results.append(attend())
            sizes.append(sum(size for size in allocations(attend) if size > 0))
    attention._DECISIONS.clear()
    assert torch.equal(*results)
    # A second copy would have 24 logits and indicators, for queries, keys and values of two heads and two samples.
    assert sizes[0] - sizes[1] == 2 * 126 * 3 * 2 * 24 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terms": RelativeTerms()}, "tables of keys and values"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, "no attn_mask"),
        ({"dropout_p": 0.1}, "no attn_mask, is_causal, dropout_p"),
        ({"grid": make_grid(2, 3, valid=torch.ones(6, dtype=torch.bool))}, "without padding"),
        ({"position_query": torch.ones(2, 2, 6, 5, dtype=torch.float64)}, "no position_query"),
    ],
)
def test_what_is_not_the_usual_case_is_refused_by_name_and_computed_otherwise(changes, message):
    q, k, v, terms, grid = draw_case(2, 3)
    arguments = {"query": q, "key": k, "value": v, "terms": terms, "grid": grid} | changes
    with pytest.raises(ValueError, match=f"backend 'lean' takes.*{message}.*use 'auto'"):
        relative_attention(**arguments, backend="lean")
    if "dropout_p" not in changes:
        expected = relative_attention(**arguments, backend="reference")
        torch.testing.assert_close(relative_attention(**arguments), expected)


def test_a_packed_projection_whose_queries_or_tables_would_change_is_left_to_the_general_way():
    q, k, v, terms, grid = draw_case(2, 3)
    packed = torch.cat([part.transpose(1, 2) for part in (q, k, v)], dim=2)
    by_head = terms._replace(key=AxisTables(terms.key.rows.expand(2, -1, -1), terms.key.cols))
    for changed in (by_head, terms._replace(query_bias=q[0, :, 0])):
        assert attend_projected(packed, changed, grid, 0.5, "auto") is None
    assert attend_projected(packed, terms, grid, 1e-5, "auto") is None
    assert attend_projected(packed, terms, grid, 0.5, "fused") is None
    assert attend_projected(packed, terms, grid, 0.5, "auto") is not None


def test_arguments_are_checked_again_where_a_shape_a_dtype_or_an_option_differs(monkeypatch):
    counted = []
    monkeypatch.setattr(attention, "checked", lambda inputs: counted.append(1) or checked(inputs))
    monkeypatch.setattr(attention, "_DECISIONS", Remembered())
    q, k, v, terms, grid = draw_case(2, 3)
    for _ in range(3):
        relative_attention(q, k, v, terms, grid)
    assert len(counted) == 1
    with pytest.raises(ValueError, match=r"terms\.key\.rows has 4 rows"):
        relative_attention(q, k, v, terms._replace(key=AxisTables(terms.key.rows[:4], terms.key.cols)), grid)
    with pytest.raises(ValueError, match="value has dtype"):
        relative_attention(q, k, v.float(), terms, grid)
    with pytest.raises(ValueError, match="scale must be finite"):
        relative_attention(q, k, v, terms, grid, scale=float("inf"))
    relative_attention(q, k, v, terms, make_grid(3, 2))
    # The cache of decisions has a limited size.

    def attend(width):
        parts = (part[:1, :, :1].expand(1, 2, width, 5) for part in (q, k, v))
        relative_attention(*parts, terms, make_grid(1, width), backend="lean")

    for width in range(1, 80):
        attend(width)
    assert 1 < len(attention._DECISIONS) <= MOST_RESULTS
    monkeypatch.setattr(grids, "MOST_BYTES", 1)
    attend(80)
    assert len(attention._DECISIONS) == 1


def test_under_autocast_single_precision_is_lowered_as_stock_attention_lowers_it():
    q, k, v, terms, grid = draw_case(2, 3)
    q, k, v = (part.float() for part in (q, k, v))
    terms = with_tables(terms, torch.Tensor.float)
    relative_attention(q, k, v, terms, grid)
    with torch.autocast("cpu", torch.bfloat16):
        out = relative_attention(q, k, v, terms, grid)
        low = relative_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), terms, grid)
    assert (out.dtype, low.dtype) == (torch.float32, torch.bfloat16)
    assert relative_error(out, low.float()) < 0.02


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["lean", "tiled", "fused", "gathered"])
def test_fake_tensors_train_as_tensors_of_their_device_would(backend):
    q, k, v, terms, grid = draw_case(2, 3)
    torch.set_warn_always(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            inputs = [mode.from_tensor(part.requires_grad_()) for part in (q, k, v)]
            out = relative_attention(*inputs, terms, grid, backend=backend)
            grads = torch.autograd.grad(out.sum(), inputs)
    finally:
        torch.set_warn_always(False)
    assert [part.shape for part in (out, *grads)] == [q.shape] * 4


class Image(torch.Tensor):
    """A tensor with metadata, as of torchvision or MONAI."""


def test_subclasses_take_the_kernel_that_pytorch_chooses_for_tensors():
    x = torch.randn(1, 2, 6, 16)
    for each in (x, x.as_subclass(Image), torch.nn.Parameter(x)):
        assert stock.stock_kernel(each, each, each) is not None
        with sdpa_kernel(SDPBackend.MATH):
            assert stock.stock_kernel(each, each, each) is None


def test_a_decision_for_a_gpu_is_made_again_in_deterministic_mode():
    with FakeTensorMode():
        query = torch.empty(1, device="cuda")
    mode, found = torch.get_deterministic_debug_mode(), set()
    try:
        for each in ("default", "warn", "error"):
            torch.set_deterministic_debug_mode(each)
            found.add(stock.switches(query))
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert len(found) == 3


def test_nothing_is_remembered_while_a_cuda_graph_is_captured(monkeypatch):
    """Its tensors would hold nothing until the first replay, which may come after other graphs and calls."""
    q, k, v, terms, grid = draw_case(2, 3)
    monkeypatch.setattr(attention, "_DECISIONS", Remembered())
    made = lambda: one_hot(make_grid(2, 3), axis_logits.grid_axes(grid), torch.float64, q.device)  # noqa: E731
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = relative_attention(q, k, v, terms, grid), made()
        assert not attention._DECISIONS
        assert made() is not captured[1]
    assert torch.equal(relative_attention(q, k, v, terms, grid), captured[0])
    assert len(attention._DECISIONS) == 1
    assert made() is made()
    assert made() is not captured[1]


@pytest.mark.parametrize("captured", [False, True])
def test_replays_of_a_cuda_graph_find_the_plan_after_many_other_sizes(captured, monkeypatch):
    q, k, v, terms, grid = draw_case(2, 3)
    decisions = Remembered()
    monkeypatch.setattr(attention, "_DECISIONS", decisions)
    relative_attention(q, k, v, terms, grid)
    alive = [weakref.ref(decision.plan.hot) for decision in decisions.values()]
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: captured)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        relative_attention(q, k, v, terms, grid)
    for size in range(MOST_RESULTS):
        decisions.add(size, torch.empty(0))
    assert [hot() is not None for hot in alive] == [captured]


@pytest.mark.parametrize(
    "kernel", [key for key in stock.KERNELS if key[0] == "cuda"], ids=lambda key: f"kernel {key[1]}"
)
def test_calls_of_gpu_kernels_fit_their_signatures(kernel):
    """Without a GPU, the kernels' shape functions check the arguments; tools/gpu/gpu_check.py checks the results."""
    with FakeTensorMode():
        operands = torch.randn(3, 2, 13, 6, 96, device="cuda", dtype=torch.bfloat16).transpose(2, 3).unbind()
        results = stock.KERNELS[kernel].forward(*operands, 0.3)
        grads = stock.KERNELS[kernel].backward(results[0], operands, results, 0.3)
    assert [part.shape for part in (results[0], *grads)] == [(2, 6, 13, 96)] * 4
