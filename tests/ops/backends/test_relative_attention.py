"""Exact attention compared with brute force over pairs of tokens, and its promises about masks and shifts."""

from functools import partial
from itertools import product

import pytest
import torch
from draws import (
    BACKENDS,
    JOINT,
    assert_all_close,
    assert_same,
    brute_force,
    draw,
    draw_case,
    draw_tables,
    leaves,
    relative_error,
    with_tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import relative_attention as oracle

from relvit.ops import AxisTables, RelativeTerms, make_grid, num_tokens, relative_attention, relative_logits
from relvit.ops.backends import tiled

pytestmark = pytest.mark.usefixtures("several_tiles")


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    prefix=st.integers(0, 2),
    distance=st.tuples(st.sampled_from([0, 1, 2, 9]), st.sampled_from([0, 1, 2, 9])),
    which=st.sets(st.sampled_from("qkvb")).map(lambda letters: "".join(sorted(letters))),
    per_head=st.sampled_from(["", "v", "b", "qkvb"]),
    bucketing=st.sampled_from(["clip", "piecewise"]),
    layout_and_backend=st.sampled_from([*(("separate", name) for name in BACKENDS), *JOINT]),
    scattered=st.booleans(),
    padding=st.sampled_from(["none", "some", "a sample"]),
    seed=st.integers(0, 2**16),
)
def test_equals_brute_force_with_gradients(
    height, width, prefix, distance, which, per_head, bucketing, layout_and_backend, scattered, padding, seed
):
    layout, backend = layout_and_backend
    q, k, v, terms, grid = draw_case(height, width, prefix, distance, which, per_head, bucketing, layout, seed=seed)
    generator, patches = torch.Generator().manual_seed(seed), height * width
    if scattered:
        # Each sample has some patches of a larger grid, in any order.
        rows, cols = height + 2, width + 1
        numbers = torch.stack([torch.randperm(rows * cols, generator=generator)[:patches] for _ in range(2)])
        grid = make_grid(rows, cols, prefix, torch.stack((numbers // cols, numbers % cols), dim=-1))
    if padding != "none":
        valid = torch.rand(2, patches, generator=generator) < 0.6
        valid[0, 0] = True
        valid[1] &= padding == "some"
        grid = grid._replace(valid=valid)
    inputs = leaves(q, k, v, terms)
    expected = brute_force(q, k, v, terms, grid)
    assert_same(relative_attention(q, k, v, terms, grid, backend=backend), expected, inputs, atol=1e-10)

    single = with_tables(terms, torch.Tensor.float)
    out32 = relative_attention(q.float(), k.float(), v.float(), single, grid, backend=backend)
    assert out32.dtype == torch.float32
    torch.testing.assert_close(out32.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_relative_logits_are_the_logits_of_each_row_and_column(backend):
    sizes, prefix = (3, 5), 2
    q, _, _, terms, grid = draw_case(*sizes, prefix, (2, 1), per_head="k")
    logits = relative_logits(q, terms, grid, backend=backend)
    for h, i in product(range(2), range(num_tokens(grid))):
        here = oracle.place(i, prefix, None, *sizes)
        for axis, size in enumerate(sizes):
            tables = [table * (number == axis) for number, table in enumerate(terms.key)]
            vectors = oracle.pair_entries(tables, h, here, [(there, there) for there in range(size)], "clip")
            torch.testing.assert_close(logits[axis][:, h, i], q[:, h, i] @ vectors.T, rtol=0, atol=1e-12)
    # The row tables are per head, but all heads share the column tables.
    mixed = terms._replace(key=terms.key._replace(cols=terms.key.cols[1]))
    rows, cols = relative_logits(q, mixed, grid, backend=backend)
    torch.testing.assert_close(rows, logits[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(cols[:, 1], logits[1][:, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sample_without_valid_key_gives_zeros_forward_and_backward_in_half_precision(backend, dtype):
    q, k, v, terms, grid = draw_case(2, 3)
    grid = grid._replace(valid=torch.tensor([[True] * 6, [False] * 6]))
    inputs = leaves(*(t.to(dtype) for t in (q, k, v)), terms)
    out = relative_attention(*inputs[:3], terms, grid, backend=backend)
    assert not out[1].any()
    assert out[0].abs().min() > 0
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[1].any() for grad in grads[:3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bucketing", ["clip", "piecewise"])
def test_queries_and_keys_on_different_grids(backend, bucketing):
    generator = torch.Generator().manual_seed(5)
    # Query coordinates may be outside of the keys' grid: offsets are clipped.
    query_grid = make_grid(2, 3, 1)._replace(coords=torch.tensor([[-4, 2], [7, -1], [1, 9]]))
    key_grid = make_grid(3, 2, 2)
    # Values may be wider or narrower than queries and keys.
    q, k, v = (draw(generator, 2, 2, *size) for size in ((4, 5), (8, 5), (8, 7)))
    terms = RelativeTerms(
        query=draw_tables(generator, (1, 2), 5, 2, True),
        key=draw_tables(generator, (5, 2), 5, 2, False),
        value=draw_tables(generator, (3, 9), 7, 2, False),
        bias=draw_tables(generator, (3, 3), None, 2, False),
        bucketing=bucketing,
    )
    out = relative_attention(q, k, v, terms, query_grid, key_grid, backend=backend)
    torch.testing.assert_close(out, brute_force(q, k, v, terms, query_grid, key_grid), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e-40, 2e-3])
def test_a_bias_is_not_scaled_however_small_the_scale(backend, scale):
    q, k, v, terms, grid = draw_case(2, 3, prefix=1, which="qkvb")
    inputs = leaves(q, k, v, terms)
    expected = brute_force(q, k, v, terms, grid, scale=scale)
    grads = torch.autograd.grad(expected.sum(), inputs)
    singles = with_tables(terms, lambda table: table.detach().float().requires_grad_())
    inputs = leaves(*(t.detach().float() for t in (q, k, v)), singles)
    out = relative_attention(*inputs[:3], singles, grid, scale=scale, backend=backend)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
    assert_all_close([grad.double() for grad in torch.autograd.grad(out.sum(), inputs)], grads, atol=1e-4)


@pytest.mark.parametrize("which", ["b", "kb"])
@pytest.mark.parametrize("backend", ["lean", "fused", "tiled", "gathered"])
def test_a_bias_hides_offsets_in_float16_too(backend, which):
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which=which, per_head="b", dim=64)
    # Divided by the scale, 1/8, this number is below the lowest one of float16.
    terms.bias.rows[:, 0] = -1e4
    terms.bias.cols[1, 3:] = -1e4
    inputs = leaves(q, k, v, terms)
    low = [part.half() for part in inputs[:3]]
    got = relative_attention(*low, with_tables(terms, torch.Tensor.float), grid, backend=backend).double()
    expected = relative_attention(q, k, v, terms, grid, backend="reference")
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-2)
    found, wanted = (torch.autograd.grad(out.square().sum(), inputs) for out in (got, expected))
    assert all(relative_error(*pair) < 2e-2 for pair in zip(found, wanted, strict=True))


def test_dropout_keeps_the_expectation_and_reaches_the_value_term(monkeypatch):
    # A tile has 40 samples.
    monkeypatch.setattr(tiled, "TILE_LOGITS", 40 * 2 * 6 * 6)
    q, k, _, terms, grid = draw_case(2, 3, batch=1)
    v = torch.zeros_like(q)  # With values of zero, the output is only the value term.
    torch.manual_seed(0)
    plain = relative_attention(q, k, v, terms, grid)
    draws = relative_attention(*(part.expand(4000, -1, -1, -1) for part in (q, k, v)), terms, grid, dropout_p=0.3)
    assert draws.std(0).min() > 0.01
    torch.testing.assert_close(draws.mean(0), plain[0], rtol=0, atol=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch_and_single_token(backend):
    q, k, v, terms, grid = draw_case(1, 1)
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    torch.testing.assert_close(out, v + terms.value.rows[2] + terms.value.cols[2])
    out = relative_attention(q[:0], k[:0], v[:0], terms, grid, backend=backend)
    assert out.shape == (0, 2, 1, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_strip_is_shaw_et_als_sequence_in_a_row_or_in_a_column(backend):
    q, k, v, terms, grid = draw_case(1, 9, distance=(0, 3), which="kv")
    # These are eq. 3 to 5 of Shaw et al. 2018 for a sequence. The other axis has only the offset zero, whose vector is
    # added.
    offset = (torch.arange(9)[None, :] - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    a_k, a_v = terms.key.cols[offset] + terms.key.rows[0], terms.value.cols[offset] + terms.value.rows[0]
    logits = (q[:, :, :, None] * (k[:, :, None] + a_k)).sum(-1) / 5**0.5
    expected = (logits.softmax(-1)[..., None] * (v[:, :, None] + a_v)).sum(-2)
    torch.testing.assert_close(relative_attention(q, k, v, terms, grid, backend=backend), expected, rtol=0, atol=1e-12)
    standing = terms._replace(key=AxisTables(*terms.key[::-1]), value=AxisTables(*terms.value[::-1]))
    out = relative_attention(q, k, v, standing, make_grid(9, 1), backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_shared_and_per_head_met_by_other_queries_and_keys_than_contents(backend):
    q, k, v, terms, grid = draw_case(3, 2, prefix=1, which="qkvb", per_head="qkvb")
    terms = terms._replace(
        key=AxisTables(terms.key.rows[0], terms.key.cols),
        value=AxisTables(terms.value.rows, terms.value.cols[1]),
        bias=AxisTables(terms.bias.rows[0], terms.bias.cols),
    )
    position_query, position_key = draw_case(3, 2, prefix=1, seed=1)[:2]
    options = {"position_query": position_query.requires_grad_(), "position_key": position_key.requires_grad_()}
    inputs = [*leaves(q, k, v, terms), *options.values()]
    out = relative_attention(q, k, v, terms, grid, **options, backend=backend)
    assert_same(out, brute_force(q, k, v, terms, grid, **options), inputs, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_device_is_not_read(backend):
    q, k, v, terms, grid = draw_case(2, 3)
    attend = partial(relative_attention, q, k, v, terms, grid, trained_keys=4, dropout_p=0.5, backend=backend)
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device):
            results.append(attend())
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_on_the_meta_device(backend):
    q, k, v, terms, grid = draw_case(3, 2, prefix=1, which="qkvb")
    grid = grid._replace(valid=torch.ones(2, 6, dtype=torch.bool, device="meta"))
    terms = with_tables(terms, lambda table: table.to("meta"))
    contents = (t.to("meta", torch.bfloat16) for t in (q, k, v))
    out = relative_attention(*contents, terms, grid, dropout_p=0.1, backend=backend)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "meta")
