"""LookHere: heads that see one direction each, with a bias that falls with the Euclidean distance; no parameters."""

from __future__ import annotations

import torch

from relvit.layers.positions.base import Position, axis_offsets
from relvit.ops import Grid, JointTable, RelativeTerms

# Keys that a head does not see have this bias. Half precision can represent this number. The number is finite, because
# backends multiply unused entries of a table by 0, and 0 times infinity is NaN.
HIDDEN = -1e4

# Each directed head has a pair of these vectors (dy, dx), and sees a key if the dot products of the key's offset with
# both vectors are not negative: in half of the image if both vectors are equal, otherwise in a quarter or an eighth.
UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
UP_RIGHT, UP_LEFT, DOWN_RIGHT, DOWN_LEFT = (-1, 1), (-1, -1), (1, 1), (1, -1)
VIEWS = {
    180: [(each, each) for each in (UP, DOWN, LEFT, RIGHT, UP_RIGHT, UP_LEFT, DOWN_RIGHT, DOWN_LEFT)],
    90: [
        *[(UP, LEFT), (UP, RIGHT), (DOWN, LEFT), (DOWN, RIGHT)],
        *[(UP_LEFT, UP_RIGHT), (DOWN_LEFT, DOWN_RIGHT), (UP_LEFT, DOWN_LEFT), (UP_RIGHT, DOWN_RIGHT)],
    ],
    45: [
        *[(UP_RIGHT, LEFT), (DOWN_RIGHT, LEFT), (DOWN_LEFT, UP), (DOWN_RIGHT, UP)],
        *[(UP_LEFT, RIGHT), (DOWN_LEFT, RIGHT), (UP_LEFT, DOWN), (UP_RIGHT, DOWN)],
    ],
}
EVERYWHERE = ((0, 0), (0, 0))


class LookHerePosition2d(Position):
    """LookHere: a bias -m sqrt(dy^2 + dx^2), and keys outside of a head's field of view are hidden.

    Source: Fuller et al. 2024 (arXiv 2405.13985, section 3). A field of view covers `view` degrees and includes its
    edges, so every token sees itself. The slope m is the head's slope times the layer's slope, which falls linearly
    from 1.5 in the first to 0.5 in the last layer.

    Twelve heads have the layout of the paper's ViT-B: eight heads are directed and four see everything. With views of
    180 and 90 degrees the eight directions are up, down, left, right and the four diagonals; eight views of 45 degrees
    cover the image. Directed heads have the slope 1/2, the others 1/4, 1/16, 1/64 and 1/256. These are the slopes of
    the authors' code (github.com/GreenCUBIC/lookhere, `create_lh_layer_tensor`) for the layouts
    'halves-diagonals-none', 'corners-triangles-none' and 'eighths1-eighths2-none'. The paper's slopes are twice as
    large; in the paper's terms, the global slope is 1/2 here instead of 1. The paper's models with 1/2 are level with
    those with 1 at 224 px, and one point more accurate at 1,024 px (tables 12 and 13).

    With any other number n of heads, 4 (n // 6) heads, but at least four, are directed, and the other heads see
    everything. The paper has no such layouts. Four directed heads look up, down, left and right with a view of 180
    degrees, and along the diagonals with 90. From the ninth directed head on, directions start again with half the
    slope.

    Examples:
        >>> position = LookHerePosition2d(head_dim=64, num_heads=12, layer=(0, 6))
        >>> position(make_grid(4, 6)).bias.table.shape
        torch.Size([12, 7, 11])

    Args:
        head_dim, dtype: not used, see `Position`.
        num_heads: number of heads, at least 4.
        view: field of view of a directed head in degrees: 180, 90, or, with at least eight directed heads, 45.
        layer: number of the layer, from 0 on, and number of all layers. Models and `relvit.retrofit` give this
            argument, by `relvit.layers.positions.by_name.numbered`.

    Raises:
        ValueError: `num_heads` is below 4 (below 12 with a view of 45 degrees), `view` is unknown, or `layer` is not
            (index, depth) with 0 <= index < depth.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        view: int = 180,
        layer: tuple[int, int] = (0, 1),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if view not in VIEWS:
            raise ValueError(f"view must be one of {', '.join(map(str, VIEWS))} (degrees), got {view!r}")
        least = 4 if view != 45 else 12
        if num_heads < least:
            larger = "relvit_base" if view == 45 else "relvit_small"
            raise ValueError(
                f"num_heads must be at least {least} with view {view}, got {num_heads}: give the model "
                f"num_heads={least}, or take a model with more heads, such as {larger}"
            )
        index, depth = layer
        if not 0 <= index < depth:
            raise ValueError(f"layer must be (index, depth) with 0 <= index < depth, got {layer}")
        self.num_heads: int = num_heads
        self.view: int = view
        self.layer: tuple[int, int] = (index, depth)
        like = {"device": device, "dtype": torch.float32}
        self.register_buffer("slopes", torch.empty(num_heads, **like), persistent=False)
        self.register_buffer("views", torch.empty(num_heads, 2, 2, **like), persistent=False)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute the slopes and the fields of view."""
        index, depth = self.layer
        of_layer = 1.5 - index / max(1, depth - 1)
        directed = max(4, 4 * (self.num_heads // 6))
        views = [VIEWS[self.view][head % 8] for head in range(directed)]
        slopes = [2.0 ** -(head // 8 + 1) for head in range(directed)]
        everywhere = self.num_heads - directed
        # Of the heads that see everything, `repeats` neighbouring heads have the same slope, as in the authors' code
        # with 16 heads, where 8 heads see everything and `repeats` is 2.
        repeats = max(1, everywhere // 4)
        views += [EVERYWHERE] * everywhere
        slopes += [4.0 ** -(head // repeats % 4 + 1) for head in range(everywhere)]
        like = {"dtype": self.slopes.dtype, "device": self.slopes.device}
        self.slopes.copy_(of_layer * torch.tensor(slopes, **like))
        self.views.copy_(torch.tensor(views, **like))

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return the bias, a joint table (num_heads, 2 H - 1, 2 W - 1), hidden entries -1e4."""
        dy, dx = axis_offsets(grid, None, None, self.slopes)
        dy, dx = dy[:, None], dx[None]
        rows, cols = (self.views[..., axis, None, None] for axis in (0, 1))
        visible = (rows * dy + cols * dx >= 0).all(dim=1)
        bias = -self.slopes[:, None, None] * (dy**2 + dx**2).sqrt()
        return RelativeTerms(bias=JointTable(torch.where(visible, bias, HIDDEN)))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, view={self.view}, layer={self.layer}"
