"""Draw docs/idea.png, the picture in the README: `python tools/draw_idea.py`.

One query patch on a 6 x 9 grid and smooth made-up tables; the colours are those of `relvit.ops.relative_logits`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_logits

HEIGHT, WIDTH, CLIP = 6, 9, 3
QUERY, KEY = (3, 3), (1, 7)
TARGET = Path(__file__).parent.parent / "docs" / "idea.png"
TEXT = """query  [ q | row logits | column logits ]
key    [ k | row one-hot | column one-hot ]
       -> content + relative logit

value  [ v | row one-hot | column one-hot ]
       -> values + row and column marginals,
          times the value tables

memory O(N (H + W)), never N x N"""


def draw() -> Figure:
    """Draw the offset of a key, the logits of a query, and the augmented vectors."""
    offsets = torch.arange(-CLIP, CLIP + 1, dtype=torch.float32)[:, None]
    terms = RelativeTerms(key=AxisTables(torch.exp(-((offsets + 1) ** 2) / 3), torch.exp(-((offsets - 1) ** 2) / 4)))
    logits = relative_logits(torch.ones(1, 1, HEIGHT * WIDTH, 1), terms, make_grid(HEIGHT, WIDTH))
    rows, cols = (one[0, 0, QUERY[0] * WIDTH + QUERY[1]] for one in logits)

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right, text = figure.subplots(1, 3, width_ratios=(1, 1.15, 0.95))
    left.set_title("the offset (dy, dx) from query to key", fontsize=11)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            colour = {QUERY: "#d1495b", KEY: "#2e86ab"}.get((y, x), "#eef1f4")
            left.add_patch(Rectangle((x, y), 0.94, 0.94, color=colour))
    for name, (y, x) in (("q", QUERY), ("k", KEY)):
        left.text(x + 0.47, y + 0.47, name, ha="center", va="center", color="white", fontsize=13, weight="bold")
    corner = (QUERY[1] + 0.47, KEY[0] + 0.47)
    for start, end in (((corner[0], QUERY[0] + 0.1), corner), (corner, (KEY[1], corner[1]))):
        left.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#333", "shrinkA": 0, "shrinkB": 0})
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
    for axes in (left, right, text):
        axes.axis("off")
    text.text(0.5, 0.84, "so one stock attention does it all", ha="center", fontsize=11, transform=text.transAxes)
    text.text(0.0, 0.47, TEXT, va="center", family="monospace", fontsize=8.5, transform=text.transAxes)
    return figure


if __name__ == "__main__":
    draw().savefig(TARGET, dpi=110)
