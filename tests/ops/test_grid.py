"""Grids of tokens: raster order, coordinates, prefix tokens, padding."""

import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from relvit.ops import Grid, grid, grid_from_naflex, key_mask, make_grid, num_tokens, patch_coords
from relvit.ops.grid import keep_tokens, once_per_raster


def test_raster_order_is_row_by_row():
    grid = make_grid(2, 3, prefix=1)
    assert num_tokens(grid) == 7
    assert patch_coords(grid).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert key_mask(grid) is None


def test_prefix_tokens_are_always_valid():
    grid = make_grid(1, 3, prefix=2, valid=torch.tensor([True, False, True]))
    assert key_mask(grid).tolist() == [[True, True, True, False, True]]


def test_sizes_may_be_integers_of_numpy():
    grid = make_grid(np.int64(2), np.int32(3), np.int64(1))
    assert grid == make_grid(2, 3, 1)
    assert all(type(size) is int for size in grid[:3])


def test_indices_of_kept_patches_may_be_integers_of_any_width():
    tokens, grid = torch.randn(2, 7, 3), make_grid(2, 3, prefix=1)
    keep = torch.tensor([[4, 0], [5, 1]])
    expected = keep_tokens(tokens, grid, keep)
    assert torch.equal(expected[0][1], tokens[1, [0, 6, 2]])
    for dtype in (torch.int32, torch.uint8):
        kept, kept_grid = keep_tokens(tokens, grid, keep.to(dtype))
        assert torch.equal(kept, expected[0])
        assert torch.equal(kept_grid.coords, expected[1].coords)


def test_results_for_many_grids_are_bounded_in_bytes_and_blocks_share_even_the_largest(monkeypatch):
    monkeypatch.setattr(grid, "MOST_BYTES", 1000)
    made = []

    @once_per_raster
    def make(grid):
        result = torch.zeros(10 * grid.height)
        made.append((weakref.ref(result), result.nbytes))
        # A view takes no memory of its own.
        return result, result.expand(100, -1)

    for _ in range(24):
        for height in (1, 2, 3, 4):
            make(Grid(height, 5, valid=torch.ones(5 * height, dtype=torch.bool)))
    assert len(made) == 4
    for height in range(5, 30):
        assert make(Grid(height, 5)) is make(Grid(height, 5))
        alive = [size for result, size in made if result() is not None]
        assert alive == [40 * height] or sum(alive) <= 1000
    assert len(made) == 29


def test_coordinates_without_values_are_taken_as_they_are():
    places = torch.tensor([[[0, 0], [1, 2]], [[1, 1], [0, 2]]])
    grids = torch.func.vmap(lambda coords: make_grid(2, 3, coords=coords).coords)(places)
    assert torch.equal(grids, places)
    with FakeTensorMode() as mode:
        assert make_grid(2, 3, coords=mode.from_tensor(places)).coords.shape == (2, 2, 2)
    assert grid_from_naflex(places.to("meta"), None, 2, 3).coords.is_meta


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"height": 0, "width": 3}, ValueError, "height must be at least 1, got 0"),
        ({"height": 2.0, "width": 3}, TypeError, "height must be an integer, got 2.0"),
        ({"height": 2, "width": 3, "coords": [[0, 0]]}, TypeError, "coords must be a tensor, got list"),
        ({"height": 2, "width": 3, "valid": [True] * 6}, TypeError, "valid must be a tensor, got list"),
        ({"height": 2, "width": 3, "prefix": -1}, ValueError, "prefix must be at least 0, got -1"),
        ({"height": 2, "width": 3, "coords": torch.zeros(4, 2)}, TypeError, "coords must hold integers"),
        ({"height": 2, "width": 3, "coords": torch.zeros(4, 3, dtype=torch.long)}, ValueError, r"got \(4, 3\)"),
        (
            {"height": 2, "width": 3, "coords": torch.tensor([[0, 3]])},
            ValueError,
            "columns from 3 to 3.* has columns from 0 to 2",
        ),
        ({"height": 2, "width": 3, "coords": torch.tensor([[-1, 0]])}, ValueError, "rows from -1 to -1"),
        ({"height": 2, "width": 3, "valid": torch.ones(5, dtype=torch.bool)}, ValueError, r"shape \(6,\).*got \(5,\)"),
        ({"height": 2, "width": 3, "valid": torch.ones(6)}, TypeError, "boolean"),
        ({"height": 2, "width": True}, TypeError, "width must be an integer, got True"),
        ({"height": 2, "width": 3, "coords": torch.zeros(2, dtype=int)}, ValueError, r"\(B, P, 2\), got \(2,\)"),
        ({"height": 2, "width": 3, "coords": torch.zeros(2, 2).bool()}, TypeError, "hold integers, got dtype .*bool"),
        ({"height": 2, "width": 3, "valid": torch.ones(1, 2, 6).bool()}, ValueError, r"\(B, 6\), .* got \(1, 2, 6\)"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        make_grid(**arguments)
