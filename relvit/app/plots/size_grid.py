"""Draw heat maps of accuracy over heights and widths, and of differences to squares, grey below two standard errors."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from relvit.app.plots.heat_maps import SIGNED, UNSIGNED, frame
from relvit.app.plots.style import FONT, SMALL, literal, save_figure

# Differences of fewer standard errors than this are written in grey.
CERTAIN = 2
NAMES = {"acc1": "top-1 accuracy in %", "map": "mean average precision in %"}


def plot_size_grid(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], target: str | Path, title: str = ""
) -> None:
    """Draw a column of heat maps per model into a PNG: height by width of the images, numbers in the cells.

    The upper maps show accuracy in per cent (mean average precision for multi-label models). The lower maps show a
    difference in percentage points: accuracy on images of this height and width minus accuracy on the same images
    squashed to the square with (nearly) the same number of patches. Differences below two standard errors are grey. A
    frame marks sizes at which the model was trained.

    Args:
        rows: the rows that `relvit.app.evaluation.evaluate_sizes` returns for all pairs of some heights and some
            widths, with `squares`. The cell of a size that a model does not take stays empty.
        labels: the name of the model of each row.
        target: the PNG.
        title: title of the figure.
    """
    key = next(name for name in NAMES if name in rows[0])
    names = list(dict.fromkeys(labels))
    heights, widths = (sorted({row[side] for row in rows}) for side in ("height", "width"))
    quantities = {key: NAMES[key]}
    if any("square_difference" in row for row in rows):
        quantities["square_difference"] = "points above squashed squares"
    each = 0.85 * len(widths) + 1.2, 0.7 * len(heights) + 1.2
    figure = Figure(
        figsize=(max(each[0] * len(names) + 1.4, 0.115 * len(title)), each[1] * len(quantities) + 0.8),
        layout="constrained",
    )
    figure.suptitle(literal(title), fontsize=FONT)
    panels = figure.subplots(len(quantities), len(names), squeeze=False)
    for line, (quantity, label) in zip(panels, quantities.items(), strict=True):
        maps = [np.full((len(heights), len(widths)), np.nan) for _ in names]
        doubtful = [np.zeros((len(heights), len(widths)), bool) for _ in names]
        for row, of in zip(rows, labels, strict=True):
            place = heights.index(row["height"]), widths.index(row["width"])
            maps[names.index(of)][place] = 100 * row.get(quantity, np.nan)
            if quantity == "square_difference" and quantity in row:
                doubtful[names.index(of)][place] = abs(row[quantity]) < CERTAIN * row[f"{quantity}_se"]
        most = np.nanmax(np.abs(maps)) or 1.0
        low, high, colours = (np.nanmin(maps), most, UNSIGNED) if quantity == key else (-most, most, SIGNED)
        for axes, values, grey, name in zip(line, maps, doubtful, names, strict=True):
            image = axes.imshow(np.where(grey, 0, values), cmap=colours, vmin=low, vmax=high)
            dark = values < (low + high) / 2 if quantity == key else np.abs(values) > 0.7 * most
            _write(axes, values, grey, dark, "{:.1f}" if quantity == key else "{:+.1f}")
            heading = textwrap.fill(name, 9 * len(widths)) if quantity == key else ""
            axes.set_title(literal(heading), fontsize=SMALL)
            axes.set_xticks(range(len(widths)), map(str, widths), fontsize=SMALL)
            axes.set_yticks(range(len(heights)), map(str, heights), fontsize=SMALL)
            axes.set_xlabel("width in pixels", fontsize=SMALL)
            trained = next(row["train_sizes"] for row, of in zip(rows, labels, strict=True) if of == name)
            for height, width in trained:
                if height in heights and width in widths:
                    frame(axes, (heights.index(height), widths.index(width)))
        line[0].set_ylabel("height in pixels", fontsize=SMALL)
        bar = figure.colorbar(image, ax=list(line), aspect=12)
        bar.set_label(label, fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
    save_figure(figure, target)


def _write(axes: Axes, values: np.ndarray, grey: np.ndarray, dark: np.ndarray, text: str) -> None:
    """Write the number into each cell, in white where the cell is dark, in grey where the number is doubtful."""
    for place, value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "0.55" if grey[place] else "white" if dark[place] else "black"
            axes.text(*place[::-1], text.format(value), ha="center", va="center", color=colour, fontsize=SMALL)
