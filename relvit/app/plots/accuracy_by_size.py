"""Draw accuracy, loss and calibration error of several models by image size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from relvit.app.plots.style import label_axes, literal, save_with_legend

PANELS = {"acc1": "top-1 accuracy", "map": "mean average precision", "f1": "mean F1", "loss": "loss"}
PANELS["calibration_error"] = "calibration error"


def plot_sizes(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], target: str | Path, title: str = "") -> None:
    """Draw a curve per model into a PNG: accuracy, loss and calibration error by the logarithm of the image size.

    For multi-label models the figure shows mean average precision, mean F1 and loss. Error bars show standard errors of
    accuracies. The size of an image that is not square is the side of a square that has the same number of pixels. A
    dotted line marks each size at which a model was trained, and rings mark the model's points at these sizes.

    Args:
        rows: the rows that `relvit.app.evaluation.evaluate_sizes` returns.
        labels: the name of the model of each row.
        target: the PNG.
        title: title of the figure.
    """
    shapes = sorted({(_side(row), row["height"], row["width"]) for row in rows})
    names = {side: ", ".join(_name(*shape) for other, *shape in shapes if other == side) for side, *_ in shapes}
    # If the models were trained at different sizes, the dotted line of a trained size has the colour of its model;
    # otherwise it is black.
    several = len({str(row["train_sizes"]) for row in rows}) > 1
    figure = Figure(figsize=(15, 5.5), layout="constrained")
    panels = {key: quantity for key, quantity in PANELS.items() if key in rows[0]}
    for axes, (key, quantity) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for label in dict.fromkeys(labels):
            own = sorted((row for row, of in zip(rows, labels, strict=True) if of == label), key=_side)
            sides, values = [_side(row) for row in own], [row[key] for row in own]
            (line,) = axes.plot(sides, values, marker="o", label=literal(label))
            if f"{key}_se" in own[0]:
                errors = [row[f"{key}_se"] for row in own]
                axes.errorbar(sides, values, errors, fmt="none", ecolor=line.get_color())
            rings = [170 if [row["height"], row["width"]] in row["train_sizes"] else 0 for row in own]
            axes.scatter(sides, values, rings, facecolors="none", edgecolors=line.get_color())
            for height, width in own[0]["train_sizes"]:
                colour = line.get_color() if several else "black"
                axes.axvline(math.sqrt(height * width), color=colour, linestyle=":", linewidth=1.5)
        axes.set_xscale("log", base=2)
        crowded = len(names) > 8 or any(not name.isdigit() for name in names.values())
        axes.set_xticks(list(names), list(names.values()), rotation=90 if crowded else 0)
        label_axes(axes, "image size in pixels", quantity)
    axes.plot([], [], color="black", linestyle=":", label="trained size")
    save_with_legend(figure, title, target)


def _side(row: Mapping[str, Any]) -> float:
    return math.sqrt(row["height"] * row["width"])


def _name(height: int, width: int) -> str:
    return str(height) if height == width else f"{height} x {width}"
