"""More than 2^31 - 1 elements, on the meta device: the largest tensor of each backend, and errors."""

import pytest
from oracles.largest_tensor import Largest, meta

from relvit.ops import (
    AxisTables,
    Grid,
    JointTable,
    RelativeTerms,
    index_range,
    make_grid,
    num_tokens,
    relative_attention,
)
from relvit.ops.index_range import LARGEST, largest_tensor
from relvit.ops.inputs import AttentionInputs, checked


def terms_of(letters, dim, distance=7, layout=AxisTables):
    """Make tables on the meta device whose numbers of rows differ between the axes."""
    sides = (2 * distance + 1, 2 * distance + 3)
    shapes = [sides] if layout is JointTable else [(side,) for side in sides]
    tails = {"query": (dim,), "key": (dim,), "value": (dim,), "bias": ()}
    tables = {n: layout(*(meta(*s, *tail) for s in shapes)) for n, tail in tails.items() if n[0] in letters}
    return RelativeTerms(**tables)


def case(grid, letters="kv", batch=1, heads=2, dim=8, **options):
    length = num_tokens(grid)
    return (*(meta(batch, heads, length, dim) for _ in range(3)), terms_of(letters, dim, **options), grid)


GRIDS = [make_grid(9, 14, 1), make_grid(25, 30), make_grid(3, 400, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.height}x{grid.width}")
@pytest.mark.parametrize(
    ("backend", "letters", "layout"),
    [
        ("fused", "kv", AxisTables),
        ("fused", "qkvb", AxisTables),
        ("fused", "", AxisTables),
        ("tiled", "kv", AxisTables),
        ("tiled", "qkvb", AxisTables),
        ("gathered", "qkvb", AxisTables),
        ("gathered", "kv", JointTable),
    ],
)
def test_no_tensor_of_a_backend_is_larger_than_it_says(grid, backend, letters, layout):
    arguments = case(grid, letters, batch=2, layout=layout)
    says = largest_tensor(checked(AttentionInputs(*arguments)), backend)
    with Largest() as largest:
        relative_attention(*arguments, backend=backend).sum().backward()
    assert largest.numbers <= says
    # The estimate is an upper bound, and not far above: a strip has many rows and columns, and some backends join fewer
    # entries.
    assert says <= 6 * largest.numbers


@pytest.fixture
def narrow_meta(monkeypatch):
    monkeypatch.setattr(index_range, "NARROW_DEVICES", ("mps", "meta"))


def test_wrong_numbers_become_an_error(narrow_meta):
    """N x N is more than 2^31 - 1 for 46,341 tokens, but not for 46,340."""
    assert 46_340**2 <= LARGEST < 46_341**2
    fits = case(make_grid(46_340, 1), "", heads=1)
    assert relative_attention(*fits, backend="fused").shape == fits[0].shape
    message = (
        r"46341 queries to 46341 keys by backend 'fused' has a tensor of up to 2147488281 numbers; kernels of meta"
    )
    with pytest.raises(ValueError, match=message + ".* use backend='tiled', smaller batches"):
        relative_attention(*case(make_grid(46_341, 1), "", heads=1), backend="fused")


def test_tiles_go_further_than_stock_attention(narrow_meta):
    q, _, _, terms, grid = case(make_grid(90, 96), heads=1)
    _, k, v, _, key_grid = case(make_grid(500, 512), heads=1)
    with pytest.raises(ValueError, match="use backend='tiled'"):
        relative_attention(q, k, v, terms, grid, key_grid, backend="fused")
    assert relative_attention(q, k, v, terms, grid, key_grid, backend="tiled").shape == q.shape
    # A tile has all keys and at least 64 queries.
    few = (meta(1, 1, 64, 8), *(meta(1, 1, 2**25 + 1, 8) for _ in range(2)), RelativeTerms())
    with pytest.raises(ValueError, match=r"by backend 'tiled' has a tensor of .*use smaller batches"):
        relative_attention(*few, Grid(1, 64, 0), Grid(2**25 + 1, 1, 0), backend="tiled")


def test_other_devices_count_in_64_bits():
    arguments = case(make_grid(46_341, 2), "", heads=1)
    assert relative_attention(*arguments, backend="fused").shape == arguments[0].shape
