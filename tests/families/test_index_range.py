"""AFT and LSH attention with more than 2^31 - 1 elements, on the meta device: no tensor is larger than checked."""

import pytest
from oracles.largest_tensor import Largest, meta

from relvit.families.aft import aft_conv, aft_full, aft_local, aft_simple, operations
from relvit.families.reformer import lsh_attention, lsh_rotations, operation
from relvit.ops import AxisTables, RelativeTerms, index_range, make_grid, num_tokens

GRIDS = [make_grid(9, 14), make_grid(3, 700, 2)]
HEADS, DIM = 3, 8


def contents(grid, shared=False, batch=2):
    tokens = num_tokens(grid)
    return (
        meta(batch, HEADS, tokens, DIM),
        meta(batch, HEADS, tokens, 1 if shared else DIM),
        meta(2, HEADS, tokens, DIM),
    )


def lsh(grid):
    query_key, _, value = contents(grid)
    terms = RelativeTerms(bias=AxisTables(meta(5), meta(7)))
    return lsh_attention(query_key, value, grid, lsh_rotations(4, DIM, 16, device="meta"), terms=terms)


def square(grid):
    return meta(HEADS, num_tokens(grid), num_tokens(grid))


CALLS = {
    **{
        f"conv, {backend}, {shared}": lambda grid, backend=backend, shared=shared: aft_conv(
            *contents(grid, shared), meta(HEADS, 5, 7), grid, backend=backend
        )
        for backend in ("convolution", "difference", "pairs", "reference")
        for shared in (False, True)
    },
    "full, products": lambda grid: aft_full(*contents(grid), square(grid), grid, backend="products"),
    "full, pairs": lambda grid: aft_full(*contents(grid), square(grid), grid, backend="pairs"),
    "local": lambda grid: aft_local(*contents(grid), square(grid), 3, grid, backend="products"),
    "simple": lambda grid: aft_simple(*contents(grid), grid),
    "simple, causal": lambda grid: aft_simple(*contents(grid), grid, is_causal=True),
    "lsh": lsh,
}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.height}x{grid.width}")
@pytest.mark.parametrize("name", CALLS)
def test_no_tensor_is_larger_than_the_guard_takes_it_for(name, grid, monkeypatch):
    said = []
    for module in (operations, operation):
        monkeypatch.setattr(module, "check_tensor_size", lambda device, number, *_: said.append(number))
    # The tiles of the backend 'pairs' have at most this number of elements, which every device can index.
    tile = 2**24 if "pairs" in name else 0
    with Largest() as largest:
        CALLS[name](grid).sum().backward()
    assert largest.numbers <= max(*said, tile)


def test_wrong_numbers_become_an_error(monkeypatch):
    monkeypatch.setattr(index_range, "NARROW_DEVICES", ("mps", "meta"))
    small, large = make_grid(8, 8), make_grid(8192, 8192)
    for call in (lambda grid: aft_simple(*contents(grid), grid), lsh):
        call(small)
        with pytest.raises(ValueError, match=r"of 67108864 tokens .* numbers; kernels of meta count to 2\^31 - 1"):
            call(large)
    wide = make_grid(200, 250)
    with pytest.raises(ValueError, match=r"AFT's bias of 50000 x 50000 places .* use aft_conv or aft_simple"):
        aft_full(*contents(wide), square(wide), wide)
