"""Draw docs/idea.png, the picture in the README: `python tools/draw_idea.py`.

One query patch on a 6 x 9 grid and smooth made-up tables; the numbers shown are those of `relvit.ops.relative_logits`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_logits

HEIGHT, WIDTH, CLIP = 6, 9, 3
QUERY, KEY = (3, 3), (1, 7)
TARGET = Path(__file__).parent.parent / "docs" / "idea.png"


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Row logits (H,) and column logits (W,) of the query patch."""
    offsets = torch.arange(-CLIP, CLIP + 1, dtype=torch.float32)[:, None]
    terms = RelativeTerms(key=AxisTables(torch.exp(-((offsets + 1) ** 2) / 3), torch.exp(-((offsets - 1) ** 2) / 4)))
    rows, cols = relative_logits(torch.ones(1, 1, HEIGHT * WIDTH, 1), terms, make_grid(HEIGHT, WIDTH))
    index = QUERY[0] * WIDTH + QUERY[1]
    return rows[0, 0, index], cols[0, 0, index]


def draw() -> Figure:
    rows, cols = logits()
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right, text = figure.subplots(1, 3, width_ratios=(1, 1.15, 0.95))

    left.set_title("a key lies (dy, dx) from the query", fontsize=11)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            colour = {QUERY: "#d1495b", KEY: "#2e86ab"}.get((y, x), "#eef1f4")
            left.add_patch(Rectangle((x, y), 0.94, 0.94, color=colour))
    for name, (y, x) in (("q", QUERY), ("k", KEY)):
        left.text(x + 0.47, y + 0.47, name, ha="center", va="center", color="white", fontsize=13, weight="bold")
    corner = (QUERY[1] + 0.47, KEY[0] + 0.47)
    start, end = (QUERY[1] + 0.47, QUERY[0] + 0.1), (KEY[1], KEY[0] + 0.47)
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "color": "#333", "shrinkA": 0, "shrinkB": 0, "lw": 1.5}
    left.add_patch(FancyArrowPatch(start, corner, **style))
    left.add_patch(FancyArrowPatch(corner, end, **style))
    left.text(corner[0] - 0.15, 2.3, f"dy = {KEY[0] - QUERY[0]}", ha="right", fontsize=11)
    left.text(5.2, KEY[0] - 0.15, f"dx = {KEY[1] - QUERY[1]}, clipped to {CLIP}", ha="center", fontsize=11)
    left.set(xlim=(-0.1, WIDTH), ylim=(HEIGHT, -0.1))

    right.set_title("H row logits + W column logits = all H x W", fontsize=11)
    scale = {"cmap": "magma", "vmin": 0.0, "vmax": float(rows.max() + cols.max())}
    right.imshow((rows[:, None] + cols[None, :]).numpy(), extent=(0, WIDTH, HEIGHT, 0), **scale)
    right.imshow(rows[:, None].numpy(), extent=(-1.6, -0.6, HEIGHT, 0), **scale)
    right.imshow(cols[None, :].numpy(), extent=(0, WIDTH, -0.6, -1.6), **scale)
    right.text(-0.3, 3, "+", ha="center", va="center", fontsize=14)
    right.add_patch(Rectangle((QUERY[1], QUERY[0]), 1, 1, fill=False, edgecolor="white", lw=2))
    right.set(xlim=(-1.7, WIDTH), ylim=(HEIGHT, -1.7))

    for axes in (left, right):
        axes.set_aspect("equal")
        axes.axis("off")
    text.axis("off")
    text.text(0.5, 0.84, "so one stock attention does it all", ha="center", fontsize=11, transform=text.transAxes)
    lines = (
        "query  [ q | row logits | column logits ]\n"
        "key    [ k | row one-hot | column one-hot ]\n"
        "       -> content + relative logit\n\n"
        "value  [ v | row one-hot | column one-hot ]\n"
        "       -> values + row and column marginals,\n"
        "          times the value tables\n\n"
        "memory O(N (H + W)), never N x N"
    )
    text.text(0.0, 0.47, lines, va="center", family="monospace", fontsize=8.5, transform=text.transAxes)
    return figure


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    draw().savefig(TARGET, dpi=110)
    print(TARGET.relative_to(Path.cwd()) if TARGET.is_relative_to(Path.cwd()) else TARGET)
