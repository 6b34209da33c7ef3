"""Stretched positions: attention with fractional offsets by the formula, pair by pair, at smaller and larger sizes."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from oracles.relative_attention import place, row_of

from relvit.layers import RelativePosition2d, SlopePosition2d
from relvit.layers.positions.base import stretch
from relvit.ops import make_grid, num_tokens, relative_attention

HEADS, DIM = 2, 3
# Each case has rows and columns in training and here, the number of prefix tokens, the clip distance and options.
CASES = {
    "larger": ((3, 2), (4, 3), 1, (2, 1), {"rel_terms": "qkvb", "shared_heads": False}),
    "smaller": ((6, 5), (4, 2), 0, (3, 2), {"rel_terms": "qkvb"}),
    "beyond the grid": ((3, 4), (5, 2), 2, (7, 6), {"rel_terms": "kvb"}),
    "a patch": ((3, 3), (1, 4), 0, 0, {"rel_terms": "k"}),
    "piecewise": ((3, 3), (2, 7), 1, (1, 2), {"rel_terms": "qkvb", "bucketing": "piecewise"}),
}
JOINT = {
    "joint": ((4, 3), (2, 5), 1, (2, 1), {"rel_terms": "qkvb", "layout": "joint"}),
    "joint, per head": ((2, 3), (3, 4), 0, 1, {"rel_terms": "kv", "layout": "joint", "shared_heads": False}),
    "joint, piecewise": ((3, 3), (2, 5), 0, 1, {"rel_terms": "vb", "layout": "joint", "bucketing": "piecewise"}),
}


def at(table, offsets, bucketing):
    """Interpolate a table linearly at fractional offsets, one offset for each of its axes."""
    total = 0
    lower = [math.floor(offset) for offset in offsets]
    for corner in range(2 ** len(offsets)):
        ends = [low + (corner >> axis & 1) for axis, low in enumerate(lower)]
        weight = math.prod(1 - abs(offset - end) for offset, end in zip(offsets, ends, strict=True))
        entry = table
        for end in ends:
            entry = entry[row_of(end, (entry.shape[0] - 1) // 2, bucketing)]
        total = total + float(weight) * entry
    return total


def vectors(position, term, grid, trained):
    """Compute the vectors a_ij of a term, (heads, N, N, dim), or the numbers of the bias, (heads, N, N)."""
    dim = () if term == "bias" else (DIM,)
    places = [place(i, grid.prefix, None, grid.height, grid.width) for i in range(num_tokens(grid))]
    ratios = [Fraction(before, now) for before, now in zip(trained, (grid.height, grid.width), strict=True)]
    heads = []
    for head in range(HEADS):
        tables = [getattr(position, f"{term}_{part}", None) for part in ("rows", "cols", "table")]
        tables = [table for table in tables if table is not None]
        if not position.shared_heads or term == "bias":
            tables = [table[head] for table in tables]
        entries = {None: torch.zeros(dim, dtype=torch.float64)}
        pairs = []
        for here, there in itertools.product(places, places):
            offset = None
            if here is not None and there is not None:
                offset = tuple((b - a) * ratio for a, b, ratio in zip(here, there, ratios, strict=True))
            if offset not in entries:
                parts = zip(tables, [[o] for o in offset] if len(tables) == 2 else [offset], strict=True)
                entries[offset] = sum(at(table, offsets, position.bucketing) for table, offsets in parts)
            pairs.append(entries[offset])
        heads.append(torch.stack(pairs).reshape(len(places), len(places), *dim))
    return torch.stack(heads)


def by_the_formula(query, key, value, position, grid, trained):
    a = dict.fromkeys(("query", "key", "value", "bias"), 0.0)
    for term in a:
        if any(name.startswith(term) for name, _ in position.named_parameters()):
            a[term] = vectors(position, term, grid, trained)
    content = query[:, :, :, None] * (key[:, :, None] + a["key"]) + key[:, :, None] * a["query"]
    weights = (DIM**-0.5 * content.sum(-1) + a["bias"]).softmax(-1)
    return (weights[..., None] * (value[:, :, None] + a["value"])).sum(-2)


@pytest.mark.parametrize("case", [*CASES, *JOINT])
def test_attention_is_that_of_the_formula(case):
    trained, (height, width), prefix, distance, options = {**CASES, **JOINT}[case]
    torch.manual_seed(0)
    position = RelativePosition2d(DIM, HEADS, max_distance=distance, init_std=1.0, **options).double()
    position.trained_grid = trained
    grid = make_grid(height, width, prefix)
    query, key, value = torch.randn(3, 2, HEADS, num_tokens(grid), DIM, dtype=torch.float64).requires_grad_()
    expected = by_the_formula(query, key, value, position, grid, trained)
    leaves = [query, key, value, *position.parameters()]
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for backend in ("reference", "gathered") if case in JOINT else ("reference", "gathered", "fused", "tiled"):
        got = relative_attention(query, key, value, position(grid), grid, backend=backend)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), leaves), wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("max_distance", [None, (1, 3)])
@pytest.mark.parametrize("sizes", [(5, 9), (2, 3), (4, 9)])
def test_slopes_fall_with_the_distance_in_trained_patches(max_distance, sizes):
    position, trained = SlopePosition2d(DIM, HEADS, max_distance), (4, 6)
    position.trained_grid = trained
    for table, size, before, most in zip(
        position.double()(make_grid(*sizes)).bias, sizes, trained, max_distance or (math.inf,) * 2, strict=True
    ):
        reach = (table.shape[1] - 1) // 2
        assert reach >= min(size - 1, most * size / before)
        for offset in range(-reach, reach + 1):
            distance = min(abs(offset) * before / size, most)
            expected = torch.tensor([-distance / 16, -distance / 256], dtype=torch.float64)
            torch.testing.assert_close(table[:, offset + reach], expected, rtol=1e-6, atol=0)


def test_at_the_trained_size_tables_stay_bit_by_bit():
    torch.manual_seed(0)
    position = RelativePosition2d(DIM, HEADS, rel_terms="kb", max_distance=(2, 3), bucketing="piecewise")
    position.trained_grid = (4, 6)
    terms = position(make_grid(4, 6, prefix=1))
    assert terms.key.rows is position.key_rows
    assert terms.bias.cols is position.bias_cols
    assert terms.bucketing == "piecewise"
    # A graph for all sizes also stretches at the trained size, where the result must be the table itself.
    assert torch.equal(stretch(position.key_cols, -2, 6, 6, "clip"), position.key_cols)


def test_number_of_rows_and_half_precision():
    torch.manual_seed(0)
    table = torch.randn(2, 7, 3, dtype=torch.float64)
    # The new clip distance is k r, rounded up: 3 * 5 / 4 = 3.75 becomes 4, and below 3 * 6 / 4 = 4.5 becomes 5.
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        low = table.to(dtype)
        got = stretch(low, -2, 5, 4, "clip")
        assert (got.shape, got.dtype) == ((2, 9, 3), dtype)
        exact = stretch(low.double(), -2, 5, 4, "clip")
        # The result is computed in higher precision and rounded once.
        torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert stretch(table, -2, 6, 4, "clip").shape == (2, 11, 3)


@pytest.mark.parametrize("bucketing", ["clip", "piecewise"])
def test_gradients_in_bfloat16_are_summed_without_rounding(bucketing):
    torch.manual_seed(0)
    half = torch.randn(15, 3, dtype=torch.bfloat16, requires_grad=True)
    exact = half.detach().double().requires_grad_()
    # Each row of the table adds up the gradients of 7 rows or more.
    for table in (half, exact):
        torch.manual_seed(0)
        new = stretch(table, -2, 56, 14, bucketing)
        new.backward(torch.randn(new.shape).bfloat16().to(new))
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_padded_batches_are_refused():
    position = RelativePosition2d(DIM, HEADS)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    grid = make_grid(2, 3, valid=valid)
    assert position(grid).key.rows is position.key_rows
    position.trained_grid = (2, 3)
    with pytest.raises(ValueError, match=r"tables cannot be stretched for a padded batch: give .* as a tensor"):
        position(grid)
