"""The exact attention against a brute force over token pairs, and the promises about gradients, masks and shifts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import relative_attention as oracle
from torch.nn.attention import SDPBackend, sdpa_kernel

from relvit.ops import (
    AxisTables,
    JointTable,
    RelativeTerms,
    attention,
    choose,
    gathered,
    make_grid,
    num_tokens,
    relative_attention,
    relative_logits,
    tiled,
)

BACKENDS = ("reference", "fused", "tiled", "gathered")
JOINT = (("joint", "reference"), ("joint", "gathered"))


@pytest.fixture(autouse=True, scope="module")
def several_tiles():
    """Small cases must still be made of several tiles, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiled, gathered):
            patch.setattr(module, "TILE_LOGITS", 1)
            patch.setattr(module, "LEAST_QUERIES", 4)
        yield


def draw_tables(distance, dim, heads, per_head, generator, layout="separate"):
    """Tables of vectors, or of scalars with dim None."""
    lead, tail = (heads,) if per_head else (), () if dim is None else (dim,)
    if layout == "joint":
        sizes = [2 * min(k, 3) + 1 for k in distance]
        return JointTable(torch.randn(*lead, *sizes, *tail, generator=generator, dtype=torch.float64))
    draw = lambda k: torch.randn(*lead, 2 * k + 1, *tail, generator=generator, dtype=torch.float64)  # noqa: E731
    return AxisTables(*map(draw, distance))


def draw_terms(which, distance, dim, heads, per_head, generator, bucketing="clip", layout="separate"):
    def draw(letter, width):
        return draw_tables(distance, width, heads, per_head, generator, layout) if letter in which else None

    return RelativeTerms(draw("q", dim), draw("k", dim), draw("v", dim), draw("b", None), bucketing)


def draw_case(
    height, width, prefix=0, distance=(2, 2), which="kv", per_head=False, bucketing="clip", layout="separate", **sizes
):
    heads, dim, batch = 2, sizes.get("dim", 5), sizes.get("batch", 2)
    generator = torch.Generator().manual_seed(sizes.get("seed", 0))
    grid = make_grid(height, width, prefix)
    q, k, v = torch.randn(3, batch, heads, num_tokens(grid), dim, generator=generator, dtype=torch.float64)
    return q, k, v, draw_terms(which, distance, dim, heads, per_head, generator, bucketing, layout), grid


def all_places(grid, batch):
    coords = None if grid.coords is None else grid.coords.expand(batch, -1, -1).tolist()
    return [
        [oracle.place(i, grid.prefix, coords and coords[b], grid.height, grid.width) for i in range(num_tokens(grid))]
        for b in range(batch)
    ]


def brute_force(q, k, v, terms, grid, **options):
    return oracle.attention(q, k, v, terms, all_places(grid, q.shape[0]), **options)


def pairs_of(terms):
    return terms[:4]


def with_tables(terms, change):
    """The same terms with every table changed."""
    return terms._replace(
        **{
            name: type(pair)(*map(change, pair))
            for name, pair in zip(terms._fields, pairs_of(terms), strict=False)
            if pair is not None
        }
    )


def leaves(q, k, v, terms):
    tables = [t for pair in pairs_of(terms) if pair is not None for t in pair]
    return [t.requires_grad_() for t in (q, k, v, *tables)]


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    prefix=st.integers(0, 2),
    distance=st.tuples(st.sampled_from([0, 1, 2, 9]), st.sampled_from([0, 1, 2, 9])),
    which=st.sets(st.sampled_from("qkvb")).map(lambda letters: "".join(sorted(letters))),
    per_head=st.booleans(),
    bucketing=st.sampled_from(["clip", "piecewise"]),
    layout_and_backend=st.sampled_from([*(("separate", name) for name in BACKENDS), *JOINT]),
    seed=st.integers(0, 2**16),
)
def test_equals_brute_force_with_gradients(
    height, width, prefix, distance, which, per_head, bucketing, layout_and_backend, seed
):
    layout, backend = layout_and_backend
    q, k, v, terms, grid = draw_case(height, width, prefix, distance, which, per_head, bucketing, layout, seed=seed)
    inputs = leaves(q, k, v, terms)
    expected = brute_force(q, k, v, terms, grid)
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected_grads = torch.autograd.grad(expected, inputs, cotangent, allow_unused=True, materialize_grads=True)

    out = relative_attention(q, k, v, terms, grid, backend=backend)
    grads = torch.autograd.grad(out, inputs, cotangent, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-10)

    single = with_tables(terms, torch.Tensor.float)
    out32 = relative_attention(q.float(), k.float(), v.float(), single, grid, backend=backend)
    assert out32.dtype == torch.float32
    torch.testing.assert_close(out32.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["k", "v", "kv", "qb", "qkvb"])
@pytest.mark.parametrize("per_head", [False, True])
def test_gradcheck(which, per_head):
    q, k, v, terms, grid = draw_case(2, 3, prefix=1, distance=(1, 1), which=which, per_head=per_head, dim=3, batch=1)
    inputs = leaves(q, k, v, terms)

    def run(q, k, v, *tables):
        remaining = iter(tables)
        return relative_attention(q, k, v, with_tables(terms, lambda _: next(remaining)), grid)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(("height", "width"), [(3, 5), (5, 2)])
def test_relative_logits_are_the_logits_of_each_row_and_column(backend, prefix, height, width):
    q, _, _, terms, grid = draw_case(height, width, prefix, distance=(2, 1), per_head=True)
    rows, cols = relative_logits(q, terms, grid, backend=backend)
    for b in range(2):
        for h in range(2):
            for i in range(num_tokens(grid)):
                here = oracle.place(i, prefix, None, height, width)
                for r in range(height):
                    want = (
                        0.0 if here is None else q[b, h, i] @ terms.key.rows[h, oracle.row_of(r - here[0], 2, "clip")]
                    )
                    assert abs(float(rows[b, h, i, r]) - float(want)) < 1e-12
                for c in range(width):
                    want = (
                        0.0 if here is None else q[b, h, i] @ terms.key.cols[h, oracle.row_of(c - here[1], 1, "clip")]
                    )
                    assert abs(float(cols[b, h, i, c]) - float(want)) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_patches_and_padding_with_coords_per_sample(backend):
    generator = torch.Generator().manual_seed(3)
    coords = torch.tensor([[[0, 0], [2, 3], [1, 1], [2, 0]], [[1, 3], [0, 2], [2, 2], [0, 0]]])
    valid = torch.tensor([[True, True, False, True], [True, False, False, True]])
    grid = make_grid(3, 4, 1, coords, valid)
    q, k, v = torch.randn(3, 2, 2, 5, 6, generator=generator, dtype=torch.float64)
    terms = RelativeTerms(
        query=draw_tables((1, 1), 6, 2, False, generator),
        key=draw_tables((1, 2), 6, 2, False, generator),
        value=draw_tables((2, 1), 6, 2, True, generator),
        bias=draw_tables((2, 3), None, 2, True, generator),
    )
    inputs = leaves(q, k, v, terms)
    keys_valid = [[True, *sample] for sample in valid.tolist()]
    expected = brute_force(q, k, v, terms, grid, valid=keys_valid)
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for got, want in zip(
        torch.autograd.grad(out, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sample_without_valid_key_gives_zeros_forward_and_backward(backend, dtype):
    q, k, v, terms, grid = draw_case(2, 3)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    grid = grid._replace(valid=torch.tensor([[True] * 6, [False] * 6]))
    inputs = leaves(q, k, v, terms)
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].abs().min() > 0
    for grad in torch.autograd.grad(out.sum(), inputs):
        assert grad.isfinite().all()
    assert all(
        not grad[1].any()
        for grad in torch.autograd.grad(relative_attention(q, k, v, terms, grid, backend=backend).sum(), (q, k, v))
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bucketing", ["clip", "piecewise"])
def test_queries_and_keys_on_different_grids(backend, bucketing):
    generator = torch.Generator().manual_seed(5)
    # Query coordinates may lie outside the key grid; the clip takes care of it.
    query_grid = make_grid(2, 3, 1)._replace(coords=torch.tensor([[-4, 2], [7, -1], [1, 9]]))
    key_grid = make_grid(3, 2, 2)
    q = torch.randn(2, 2, 4, 5, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 8, 5, generator=generator, dtype=torch.float64)
    terms = RelativeTerms(
        query=draw_tables((1, 2), 5, 2, True, generator),
        key=draw_tables((5, 2), 5, 2, False, generator),
        value=draw_tables((3, 9), 5, 2, False, generator),
        bias=draw_tables((3, 3), None, 2, False, generator),
        bucketing=bucketing,
    )
    expected = oracle.attention(q, k, v, terms, all_places(query_grid, 2), key_places=all_places(key_grid, 2))
    out = relative_attention(q, k, v, terms, query_grid, key_grid, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["boolean", "additive", "causal"])
def test_masks_and_scale(backend, kind):
    q, k, v, terms, grid = draw_case(2, 3, prefix=1)
    generator = torch.Generator().manual_seed(1)
    n = num_tokens(grid)
    options = {"scale": 0.3, "backend": backend}
    if kind == "causal":
        allowed = torch.ones(n, n, dtype=torch.bool).tril()
        options["is_causal"] = True
        bias = torch.zeros(n, n, dtype=torch.float64).masked_fill(~allowed, -1e30)
    elif kind == "boolean":
        allowed = torch.rand(n, n, generator=generator) < 0.6
        allowed.fill_diagonal_(True)
        options["attn_mask"] = allowed
        bias = torch.zeros(n, n, dtype=torch.float64).masked_fill(~allowed, -1e30)
    else:
        bias = torch.randn(n, n, generator=generator, dtype=torch.float64)
        options["attn_mask"] = bias
    expected = brute_force(q, k, v, terms, grid, scale=0.3, mask=bias.expand(2, 2, n, n))
    torch.testing.assert_close(relative_attention(q, k, v, terms, grid, **options), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_tokens_with_their_coordinates_and_shifting_all_coordinates(backend):
    generator = torch.Generator().manual_seed(2)
    coords = torch.cartesian_prod(torch.arange(3), torch.arange(4))
    grid = make_grid(9, 9, 1, coords)
    q, k, v = torch.randn(3, 2, 2, 13, 5, generator=generator, dtype=torch.float64)
    terms = draw_terms("qkvb", (2, 3), 5, 2, False, generator)
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    dense = relative_attention(q, k, v, terms, make_grid(3, 4, 1), backend=backend)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)
    shifted = relative_attention(q, k, v, terms, make_grid(9, 9, 1, coords + torch.tensor([5, 2])), backend=backend)
    torch.testing.assert_close(out, shifted, rtol=0, atol=1e-12)
    order = torch.randperm(12, generator=generator)
    tokens = torch.cat((torch.tensor([0]), order + 1))
    permuted = relative_attention(
        q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], terms, make_grid(9, 9, 1, coords[order]), backend=backend
    )
    torch.testing.assert_close(permuted, out[:, :, tokens], rtol=0, atol=1e-12)


def test_dropout_keeps_the_expectation_and_reaches_the_value_term():
    q, k, _, terms, grid = draw_case(2, 3, batch=1)
    v = torch.zeros_like(q)  # the output is the value term alone
    torch.manual_seed(0)
    plain = relative_attention(q, k, v, terms, grid)
    draws = torch.stack([relative_attention(q, k, v, terms, grid, dropout_p=0.3) for _ in range(4000)])
    assert draws.std(0).min() > 0.01
    torch.testing.assert_close(draws.mean(0), plain, rtol=0, atol=0.1)


def relative_error(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["k", "v", "q", "b", "kv", "qkvb"])
@pytest.mark.parametrize("std", [0.02, 0.3, 1.0])
def test_half_precision_loses_at_most_twice_what_stock_attention_loses(backend, dtype, which, std):
    q, k, v, terms, grid = draw_case(14, 10, prefix=1, distance=(7, 7), which=which, dim=64)
    q, k, v = (t.to(dtype).double() for t in (q, k, v))
    terms = with_tables(terms, lambda table: (std * table).to(dtype).double())
    inputs = leaves(q, k, v, terms)
    exact = relative_attention(q, k, v, terms, grid, backend="reference")
    cotangent = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact_grads = torch.autograd.grad(exact, inputs, cotangent.double())
    plain = torch.nn.functional.scaled_dot_product_attention
    stock_exact = torch.autograd.grad(plain(q, k, v), (q, k, v), cotangent.double())
    allowed = 2 * relative_error(plain(q.to(dtype), k.to(dtype), v.to(dtype)), plain(q, k, v))
    halves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    stock = torch.autograd.grad(plain(*halves), halves, cotangent)
    allowed_in_gradient = 2 * max(relative_error(got, want) for got, want in zip(stock, stock_exact, strict=True))

    terms = with_tables(terms, lambda table: table.detach().float().requires_grad_())
    halves = leaves(*(t.detach().to(dtype) for t in (q, k, v)), terms)
    out = relative_attention(*halves[:3], terms, grid, backend=backend)
    assert out.dtype == dtype
    assert relative_error(out, exact) < allowed
    for got, want in zip(torch.autograd.grad(out, halves, cotangent), exact_grads, strict=True):
        # In the gradient of a scalar per offset, large terms of either sign cancel.
        assert relative_error(got, want) < (2 if got.dim() == 1 else 1) * allowed_in_gradient


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch_and_single_token(backend):
    q, k, v, terms, grid = draw_case(1, 1)
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    torch.testing.assert_close(out, v + terms.value.rows[2] + terms.value.cols[2])
    out = relative_attention(q[:0], k[:0], v[:0], terms, grid, backend=backend)
    assert out.shape == (0, 2, 1, 5)


def test_value_width_may_differ_from_query_width():
    q, k, _, terms, grid = draw_case(2, 3, dim=5)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, 2, 6, 11, generator=generator, dtype=torch.float64)
    terms = terms._replace(value=draw_tables((2, 2), 11, 2, False, generator))
    expected = brute_force(q, k, v, terms, grid)
    torch.testing.assert_close(relative_attention(q, k, v, terms, grid), expected, rtol=0, atol=1e-10)


def test_errors_name_the_tensor_and_what_was_expected():
    q, k, v, terms, grid = draw_case(2, 3)
    with pytest.raises(
        ValueError,
        match=r"unknown backend 'fusd' .did you mean 'fused'.*'auto', 'reference', 'fused', 'tiled', 'gathered'",
    ):
        relative_attention(q, k, v, terms, grid, backend="fusd")
    with pytest.raises(ValueError, match=r"query has shape \(2, 2, 6, 5\), that is 6 tokens, expected 7: grid has 1"):
        relative_attention(q, k, v, terms, grid._replace(prefix=1))
    with pytest.raises(ValueError, match=r"key has shape \(2, 2, 6, 4\), expected \(2, 2, N, 5\)"):
        relative_attention(q, k[..., :4], v, terms, grid)
    with pytest.raises(ValueError, match=r"value has dtype torch.float32, expected the query's torch.float64"):
        relative_attention(q, k, v.float(), terms, grid)
    even = terms._replace(key=AxisTables(terms.key.rows[:4], terms.key.cols))
    with pytest.raises(ValueError, match=r"terms.key.rows has 4 rows, expected an odd number"):
        relative_attention(q, k, v, even, grid)
    wide = terms._replace(value=AxisTables(terms.value.rows, terms.value.cols[:, :3]))
    with pytest.raises(ValueError, match=r"terms.value.cols has shape \(5, 3\), expected \(2k \+ 1, 5\)"):
        relative_attention(q, k, v, wide, grid)
    with pytest.raises(ValueError, match=r"grid.valid has shape \(3, 6\), expected \(6,\) or \(2, 6\)"):
        relative_attention(q, k, v, terms, grid._replace(valid=torch.ones(3, 6, dtype=torch.bool)))
    with pytest.raises(TypeError, match="terms must be RelativeTerms, got NoneType"):
        relative_attention(q, k, v, None, grid)
    with pytest.raises(ValueError, match="exclude each other"):
        relative_attention(q, k, v, terms, grid, attn_mask=torch.ones(6, 6, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"terms\.key, which is None"):
        relative_logits(q, terms._replace(key=None), grid)


@pytest.mark.parametrize(
    ("layout", "backend"), [("separate", "tiled"), ("separate", "gathered"), ("joint", "gathered")]
)
@pytest.mark.parametrize("which", ["kv", "qkvb"])
def test_gradcheck_of_tiles(which, layout, backend):
    q, k, v, terms, grid = draw_case(1, 5, prefix=1, distance=(1, 1), which=which, dim=2, batch=1, layout=layout)

    def run(q, k, v, *tables):
        remaining = iter(tables)
        return relative_attention(q, k, v, with_tables(terms, lambda _: next(remaining)), grid, backend=backend)

    assert torch.autograd.gradcheck(run, leaves(q, k, v, terms))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_strip_is_shaw_et_als_sequence_whether_it_lies_or_stands(backend):
    q, k, v, terms, grid = draw_case(1, 9, distance=(0, 3), which="kv")
    # Shaw et al. 2018, eq. 3-5, on a sequence; the other axis adds its one vector, of offset zero.
    offset = (torch.arange(9)[None, :] - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    a_k, a_v = terms.key.cols[offset] + terms.key.rows[0], terms.value.cols[offset] + terms.value.rows[0]
    logits = (q[:, :, :, None] * (k[:, :, None] + a_k)).sum(-1) / 5**0.5
    expected = (logits.softmax(-1)[..., None] * (v[:, :, None] + a_v)).sum(-2)
    torch.testing.assert_close(relative_attention(q, k, v, terms, grid, backend=backend), expected, rtol=0, atol=1e-12)
    standing = terms._replace(key=AxisTables(*terms.key[::-1]), value=AxisTables(*terms.value[::-1]))
    out = relative_attention(q, k, v, standing, make_grid(9, 1), backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_joint_table_that_is_a_sum_equals_separate_ones():
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which="qkvb")
    shape = lambda rows, cols: rows[:, None] + cols[None, :]  # noqa: E731
    names = RelativeTerms._fields[:4]
    joined = terms._replace(**{name: JointTable(shape(*getattr(terms, name))) for name in names})
    separate, joint = (relative_attention(q, k, v, t, grid) for t in (terms, joined))
    torch.testing.assert_close(separate, joint, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "options", "backend", "reason"),
    [
        ({}, {}, "tiled", "on the CPU"),
        ({"layout": "joint"}, {}, "gathered", "joint tables"),
        ({}, {"dropout_p": 0.1}, "tiled", "on the CPU"),
        ({"which": ""}, {}, "tiled", "on the CPU"),
        ({}, {"attn_mask": torch.ones(42, 42, dtype=torch.bool)}, "tiled", "on the CPU"),
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_auto_runs_what_it_says(case, options, backend, reason, gradient, monkeypatch):
    q, k, v, terms, grid = draw_case(6, 7, **case)
    if gradient:
        leaves(q, k, v, terms)
    ran = spied_backends(monkeypatch)
    relative_attention(q, k, v, terms, grid, **options)
    choice = choose(q, k, v, terms, grid)
    assert ran == [backend] == [choice.backend]
    assert reason in choice.reason
    assert ("no gradient" in choice.keeps) == (not gradient)


def spied_backends(monkeypatch):
    """Names of the backends that have run so far."""
    ran = []
    for name, module in attention.BACKENDS.items():
        original = module.relative_attention
        spy = lambda *args, name=name, original=original: ran.append(name) or original(*args)  # noqa: E731
        monkeypatch.setattr(module, "relative_attention", spy)
    return ran


def test_auto_takes_stock_parts_where_they_alone_can(monkeypatch):
    q, k, v, terms, grid = draw_case(3, 4)
    ran = spied_backends(monkeypatch)
    torch.func.grad(lambda q: relative_attention(q, k, v, terms, grid).sum())(q)
    with sdpa_kernel(SDPBackend.MATH):
        relative_attention(q, k, v, terms, grid)
        assert "second derivatives" in choose(q, k, v, terms, grid).reason
    assert ran == ["fused", "fused"]


def on_a_gpu(**changes):
    case = {"device": "cuda", "dtype": torch.bfloat16, "joint": False, "graph": False, "stock": False, "width": 96}
    case = attention.Case(**{**case, "gradient": True, **changes})
    return next(choice.backend for applies, choice in attention.RULES if applies(case))


def test_the_rules_for_gpus():
    assert on_a_gpu() == on_a_gpu(width=256) == on_a_gpu(dtype=torch.float32) == "fused"
    assert on_a_gpu(width=257) == on_a_gpu(dtype=torch.float64) == "tiled"
    assert on_a_gpu(width=257, graph=True) == "fused"
    assert on_a_gpu(joint=True, graph=True) == "gathered"


@pytest.mark.parametrize(("which", "backend"), [("kv", "auto"), ("qkvb", "auto"), ("qkvb", "gathered")])
def test_second_derivatives_exist_where_those_of_stock_attention_do(which, backend):
    q, k, v, terms, grid = draw_case(1, 2, prefix=1, distance=(1, 1), which=which, dim=2, batch=1)

    def run(q, k, v, *tables):
        remaining = iter(tables)
        return relative_attention(q, k, v, with_tables(terms, lambda _: next(remaining)), grid, backend=backend)

    inputs = leaves(q, k, v, terms)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(run, inputs)


def test_tiles_refuse_second_derivatives_as_fused_kernels_do():
    q, k, v, terms, grid = draw_case(2, 3)
    out = relative_attention(*leaves(q, k, v, terms)[:3], terms, grid, backend="tiled")
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("shape", [(6, 6), (2, 1, 1, 6), (2, 2, 6, 6), (6,)])
def test_a_learned_mask_gets_its_gradient(shape):
    q, k, v, terms, grid = draw_case(2, 3)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(
            relative_attention(q, k, v, terms, grid, attn_mask=mask, backend=backend).square().sum(), mask
        )[0]
        for backend in ("reference", "tiled")
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_dropout_drops_in_backward_what_it_dropped_in_forward():
    q, k, v, terms, grid = draw_case(2, 3, prefix=1, which="qkvb")
    inputs = leaves(q, k, v, terms)

    def run(q, k, v, *tables):
        torch.manual_seed(5)
        remaining = iter(tables)
        changed = with_tables(terms, lambda _: next(remaining))
        return relative_attention(q, k, v, changed, grid, dropout_p=0.4, backend="tiled")

    torch.manual_seed(5)
    assert not torch.equal(run(*inputs), relative_attention(*inputs[:3], terms, grid))
    assert torch.autograd.gradcheck(run, inputs)


def test_no_queries_give_keys_and_values_zero_gradients():
    q, k, v, terms, grid = draw_case(2, 3, which="qkvb")
    k, v, nothing = k.requires_grad_(), v.requires_grad_(), make_grid(2, 3, coords=torch.zeros(0, 2, dtype=torch.int64))
    out = relative_attention(q[:, :, :0], k, v, terms, nothing, grid, backend="tiled")
    assert out.shape == (2, 2, 0, 5)
    for grad in torch.autograd.grad(out.sum(), (k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_joint_tables_need_a_backend_that_can():
    q, k, v, terms, grid = draw_case(2, 3, which="qk", layout="joint")
    with pytest.raises(
        ValueError, match=r"terms.query is a joint table: backend 'gathered' or 'reference', not 'fused'"
    ):
        relative_attention(q, k, v, terms, grid, backend="fused")
    with pytest.raises(ValueError, match=r"terms.key is a joint table"):
        relative_logits(q, terms, grid)
    even = terms._replace(key=JointTable(terms.key.table[:, :4]))
    with pytest.raises(ValueError, match=r"terms.key.table has 5 x 4 rows, expected an odd number"):
        relative_attention(q, k, v, even, grid)
    flat = terms._replace(key=JointTable(terms.key.table[0]))
    with pytest.raises(ValueError, match=r"terms.key.table has shape \(5, 5\), expected \(2k \+ 1, 2k \+ 1, 5\)"):
        relative_attention(q, k, v, flat, grid)
