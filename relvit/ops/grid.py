"""`Grid`, where each token of a sequence is in the image: factories with checks, padding masks, a cache for rasters."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from relvit.ops.checks import check_kind, check_shape, has_shape, integer
from relvit.ops.tracing import is_capturing, knows_values, may_remember
from relvit.utils.old_torch import compiled_replace


@compiled_replace
class Grid(NamedTuple):
    """The layout of a token sequence: `prefix` tokens without coordinates, then patch tokens, each at (row, column).

    A model builds the grid once, where the image becomes patches, and passes it from block to block. A `Grid` is a
    plain tuple of integers and optional tensors, so it passes through tracing, checkpointing, compilation and export.
    `make_grid` checks its arguments; building a `Grid` directly checks nothing, and the results of backends differ if
    keys are outside of the bounds. Models build a `Grid` directly for images (`relvit/models/base.py`) and for native
    batches that have a 'grid_size' (`relvit/models/sizes/native.py`).

    Examples:
        >>> Grid(height=4, width=6, prefix=1)
        Grid(height=4, width=6, prefix=1, coords=None, valid=None)

    Attributes:
        height: number of patch rows, H. The row of a key is in 0 ... H - 1. Queries with a grid of their own may lie
            outside the grid of the keys.
        width: number of patch columns, W. The column of a key is in 0 ... W - 1.
        prefix: number of leading tokens without coordinates (class token, registers). Relative terms to, from and
            between them are zero.
        coords: (P, 2) or (B, P, 2) integers, row and column of each of P patch tokens. None: the tokens are all H W
            patches in raster order (row by row); such a grid is called a raster.
        valid: (P,) or (B, P) booleans of the P patches, False for padding, which never receives attention; None: all
            patches are real. Prefix tokens are always valid.
    """

    height: int
    width: int
    prefix: int = 0
    coords: Tensor | None = None
    valid: Tensor | None = None


def make_grid(
    height: int, width: int, prefix: int = 0, coords: Tensor | None = None, valid: Tensor | None = None
) -> Grid:
    """Build a `Grid` and check it; coordinates are compared with the bounds where Python can read their values.

    Examples:
        >>> grid = make_grid(4, 6, prefix=1)  # 4 rows and 6 columns of patches after a class token
        >>> num_tokens(grid)
        25
        >>> make_grid(4, 6, coords=torch.tensor([[0, 0], [3, 5]]))[:3]  # keeps 2 of the 24 patches
        (4, 6, 0)

    Args: see `Grid`.

    Raises:
        TypeError: `height`, `width` or `prefix` is not an integer, `coords` does not hold integers, or `valid` is not
            boolean.
        ValueError: `height` or `width` is below 1, or `prefix` is below 0; `coords` or `valid` has another shape than
            in `Grid`; or coordinates are outside of the grid.
    """
    height, width, prefix = _checked_sizes(height, width, prefix)
    if coords is not None:
        _check_integers("coords", coords)
        if coords.dim() not in (2, 3) or coords.shape[-1] != 2:
            raise ValueError(f"coords must have shape (P, 2) or (B, P, 2), got {tuple(coords.shape)}")
        _check_bounds("coords", coords, height, width)
    grid = Grid(height, width, prefix, coords, valid)
    if valid is not None:
        _check_boolean("valid", valid)
        patches = num_tokens(grid) - prefix
        if valid.dim() not in (1, 2) or valid.shape[-1] != patches:
            expected = f"({patches},) or (B, {patches}), patches without prefix tokens"
            raise ValueError(f"valid must have shape {expected}, got {tuple(valid.shape)}")
    return grid


def grid_from_naflex(patch_coord: Tensor, patch_valid: Tensor | None, height: int, width: int, prefix: int = 0) -> Grid:
    """Build the `Grid` of a batch of images of different sizes, as timm's NaFlex data loader yields them.

    Padding gets the coordinates (0, 0), because its own coordinates, such as (-1, -1), may lie outside the grid. The
    size of each image is not needed, because offsets follow from the coordinates. `height` and `width` are upper bounds
    for all images; choose them no larger than needed, because the backend 'fused' appends `height` + `width` channels
    to each vector.

    Examples:
        >>> coords = torch.tensor([[[0, 0], [0, 1], [1, 0]], [[0, 0], [1, 0], [-1, -1]]])  # images of 3 and 2 patches
        >>> valid = torch.tensor([[True, True, True], [True, True, False]])
        >>> grid_from_naflex(coords, valid, height=2, width=2).coords[1, 2]
        tensor([0, 0])

    Args:
        patch_coord: (B, P, 2) integers, row and column of each of P patches in its own image (timm's 'patch_coord').
        patch_valid: (B, P) booleans, False for padding (timm's 'patch_valid'); None: all patches are real.
        height: a number of rows that no image exceeds; it is an argument because a compiled or exported graph cannot
            read it from the data.
        width: a number of columns that no image exceeds.
        prefix: number of tokens without coordinates, which the model puts before the patches.

    Raises: see `make_grid`. Coordinates of padding may be anything.
    """
    height, width, prefix = _checked_sizes(height, width, prefix)
    _check_integers("patch_coord", patch_coord)
    if patch_coord.dim() != 3 or patch_coord.shape[-1] != 2:
        raise ValueError(f"patch_coord must have shape (B, P, 2), got {tuple(patch_coord.shape)}")
    if patch_valid is not None:
        _check_boolean("patch_valid", patch_valid)
        if patch_valid.shape != patch_coord.shape[:-1]:
            expected = tuple(patch_coord.shape[:-1])
            raise ValueError(f"patch_valid must have shape {expected}, got {tuple(patch_valid.shape)}")
        patch_coord = patch_coord.masked_fill(~patch_valid[..., None], 0)
    _check_bounds("patch_coord", patch_coord, height, width)
    return Grid(height, width, prefix, patch_coord, patch_valid)


def num_tokens(grid: Grid) -> int:
    """Return the length N of the sequence that `grid` lays out, prefix tokens included.

    Examples:
        >>> num_tokens(make_grid(4, 6, prefix=1))
        25
    """
    patches = grid.height * grid.width if grid.coords is None else grid.coords.shape[-2]
    return grid.prefix + patches


def patch_coords(grid: Grid, device: torch.device | None = None) -> Tensor:
    """Return row and column of all P patch tokens, (P, 2) or (B, P, 2) int64, also if the grid has no `coords`.

    Examples:
        >>> patch_coords(make_grid(2, 3)).tolist()
        [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    if grid.coords is not None:
        return grid.coords.to(torch.int64)
    rows = torch.arange(grid.height, device=device)[:, None].expand(grid.height, grid.width)
    cols = torch.arange(grid.width, device=device)[None, :].expand(grid.height, grid.width)
    return torch.stack((rows, cols), dim=-1).reshape(-1, 2)


def rows_and_columns(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of all P patch tokens, (1 or B, P, 1) int64 each."""
    if grid.coords is not None:
        y, x = batched_coords(grid, device).split(1, dim=-1)
        return y, x
    # Make separate tensors of rows and columns, because a compiler can compute each of them inside the kernel that
    # reads it. The compiler would have to store the single tensor that `patch_coords` stacks.
    y = torch.arange(grid.height, device=device)[:, None].expand(grid.height, grid.width)
    x = torch.arange(grid.width, device=device)[None, :].expand(grid.height, grid.width)
    return y.reshape(1, -1, 1), x.reshape(1, -1, 1)


def batched_coords(grid: Grid, device: torch.device) -> Tensor:
    """Return row and column of all P patch tokens, (1 or B, P, 2) int64."""
    coords = patch_coords(grid, device)
    return coords if coords.dim() == 3 else coords[None]


def token_places(grid: Grid, device: torch.device) -> Tensor:
    """Number each token's place, prefix tokens first, then all H W patches in raster order: (1 or B, N) int64."""
    rows, cols = batched_coords(grid, device).unbind(-1)
    prefix = torch.arange(grid.prefix, device=device).expand(rows.shape[0], -1)
    return torch.cat((prefix, grid.prefix + rows * grid.width + cols), dim=1)


def keep_patches(grid: Grid, kept: Tensor) -> Grid:
    """Return the grid of the K patches of each image that stay, given their indices among the patches, (B, K)."""
    coords = batched_coords(grid, kept.device).expand(kept.shape[0], -1, -1)
    valid = grid.valid
    if valid is not None:
        valid = valid.expand(kept.shape[0], -1).gather(1, kept)
    coords = coords.gather(1, kept[:, :, None].expand(-1, -1, 2))
    return Grid(grid.height, grid.width, grid.prefix, coords, valid)


def keep_tokens(tokens: Tensor, grid: Grid, keep: Tensor) -> tuple[Tensor, Grid]:
    """Keep the prefix tokens and K patches of each of B images, given tokens (B, N, dim) and indices (B, K)."""
    _check_integers("keep", keep)
    # With no patch and no prefix token, average pooling would yield NaN.
    if keep.dim() != 2 or len(keep) != len(tokens) or keep.shape[1] == 0:
        raise ValueError(f"keep must have shape (B, K) with B = {len(tokens)} and K > 0, got {tuple(keep.shape)}")
    keep = keep.to(torch.int64)
    first, patches = tokens[:, : grid.prefix], tokens[:, grid.prefix :]
    kept = patches.gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]))
    return torch.cat((first, kept), dim=1), keep_patches(grid, keep)


def check_tokens(
    name: str,
    tokens: Tensor,
    grid_name: str,
    grid: Grid,
    expected: tuple[int | str, ...] = ("B", "heads", "N", "head_dim"),
) -> None:
    """Raise unless `tokens` has the expected shape, with as many tokens as `grid` lays out."""
    check_shape(name, tokens, expected)
    if not isinstance(grid, Grid):
        raise TypeError(f"{grid_name} must be a Grid, got {type(grid).__name__}: make_grid(height, width) makes one")
    if grid.coords is not None:
        _check_integers(f"{grid_name}.coords", grid.coords)
    if grid.valid is not None:
        _check_boolean(f"{grid_name}.valid", grid.valid)
    patches = num_tokens(grid) - grid.prefix
    if tokens.shape[2] != num_tokens(grid):
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}, that is {tokens.shape[2]} tokens, expected {num_tokens(grid)}: "
            f"{grid_name} has prefix {grid.prefix} and {patches} patches; the shape must be "
            f"({', '.join(map(str, expected))})"
        )
    for part, tensor, tail in (("coords", grid.coords, (patches, 2)), ("valid", grid.valid, (patches,))):
        if tensor is not None and not has_shape(tensor, tail, (1, *tail), (tokens.shape[0], *tail)):
            raise ValueError(
                f"{grid_name}.{part} has shape {tuple(tensor.shape)}, expected {tail} or {(tokens.shape[0], *tail)}"
            )


def key_mask(grid: Grid) -> Tensor | None:
    """Return which tokens may be attended to, (1 or B, N) booleans, prefix tokens True; None where all may.

    Examples:
        >>> key_mask(make_grid(1, 3, prefix=1, valid=torch.tensor([True, True, False]))).tolist()
        [[True, True, True, False]]
    """
    if grid.valid is None:
        return None
    valid = grid.valid if grid.valid.dim() == 2 else grid.valid[None]
    return torch.cat((valid.new_ones(valid.shape[0], grid.prefix), valid), dim=1)


def without_padding(tokens: Tensor, valid: Tensor) -> Tensor:
    """Set padding, which may hold anything, NaN included, to zero in (B, heads, N, dim) tokens; `valid`: `key_mask`."""
    return tokens.masked_fill(~valid[:, None, :, None], 0.0)


# These limits hold for each function whose results are remembered. An index for all pairs of N tokens takes 8 N^2
# bytes, so the number of results alone would not bound their memory.
MOST_RESULTS = 64
MOST_BYTES = 2**27


class Remembered(dict[Any, Any]):
    """Results of earlier calls, which `add` forgets all at once when they become too many or take too much memory.

    The newest result is kept however large it is, because all blocks of a model use it one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        self._captured: dict[int, Any] = {}

    def find(self, key: Any) -> Any:
        """Return a result, or None; a result that is found while a CUDA graph is captured is never freed."""
        result = self.get(key)
        if result is not None and is_capturing():
            # Replays of the graph read these tensors at their present addresses, so their memory must never be freed.
            self._captured[id(result)] = result
        return result

    def add(self, key: Any, result: Any) -> Any:
        """Keep a result, which may hold tensors, and return it."""
        # Several tensors of a result may be views of the same memory, so take the set of their storages.
        storages = {leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        added = sum(storage.nbytes() for storage in storages)
        self._bytes += added
        if len(self) >= MOST_RESULTS or self._bytes > MOST_BYTES:
            self.clear()
            self._bytes = added
        self[key] = result
        return result

    def make(self, key: Any, function: Callable[[], Any]) -> Any:
        """Add the result of a function, whose operations no dispatch mode sees, and return it.

        The dispatch mode of selective checkpointing counts the operations of forward. Backward repeats them, finds the
        result here, and would take a saved tensor for that of another operation.
        """
        with _disable_current_modes():
            return self.add(key, function())


def once_per_raster(make: Callable[..., Any]) -> Callable[..., Any]:
    """Cache `make(grid, *arguments)`, which reads no `valid`, for grids without `coords`: blocks share the result."""
    remembered = Remembered()

    @wraps(make)
    def call(grid: Grid, *arguments: object) -> Any:
        if grid.coords is not None or not may_remember():
            return make(grid, *arguments)
        grid = grid._replace(valid=None)
        # PyTorch cannot save a tensor made in inference mode for backward, so results made in this mode are cached
        # separately.
        key = (torch.is_inference_mode_enabled(), grid, *arguments)
        made = remembered.get(key)
        return remembered.make(key, lambda: make(grid, *arguments)) if made is None else made

    return call


def _checked_sizes(height: int, width: int, prefix: int) -> list[int]:
    return [integer("height", height, 1), integer("width", width, 1), integer("prefix", prefix, 0)]


def _check_integers(name: str, coords: Tensor) -> None:
    check_kind(name, coords, Tensor, "a tensor")
    if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got dtype {coords.dtype}")


def _check_boolean(name: str, valid: Tensor) -> None:
    check_kind(name, valid, Tensor, "a tensor")
    if valid.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, got dtype {valid.dtype}")


def _check_bounds(name: str, coords: Tensor, height: int, width: int) -> None:
    """Compare coordinates (..., 2) with the bounds; do nothing in graphs and wherever else values are unknown."""
    if not knows_values() or not coords.numel():
        return
    try:
        # Each copy from a GPU waits until the GPU has computed the number, so copy all four numbers at once.
        lowest, highest = torch.stack(coords.flatten(0, -2).aminmax(dim=0)).tolist()
    except RuntimeError:
        # Fake tensors, tensors on the meta device and tensors inside of `torch.func.vmap` have no values.
        return
    for axis, low, high, size in zip(("row", "column"), lowest, highest, (height, width), strict=True):
        if low < 0 or high >= size:
            raise ValueError(f"{name} holds {axis}s from {low} to {high}, the grid has {axis}s from 0 to {size - 1}")
