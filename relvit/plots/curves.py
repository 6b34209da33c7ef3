"""The course of a training as a figure."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PANELS = (("loss", "loss"), ("acc1", "top-1 accuracy"))
# Columns of a quantity, and what to call them.
STAGES = (("train/{}", "train"), ("train/{}_mixed", "train, mixed images"), ("val/{}", "val"))


def read_metrics(path: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Columns of a Lightning `metrics.csv` as lists of (epoch, value), empty cells left out."""
    columns: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if name not in ("epoch", "step") and cell:
                    columns[name].append((int(row["epoch"]), float(cell)))
    return dict(columns)


def plot_curves(metrics: str | Path, target: str | Path) -> None:
    """Draw loss and top-1 accuracy of training and validation over the epochs of a `metrics.csv` into a PNG."""
    columns = read_metrics(metrics)
    # The figure class itself instead of pyplot: no global state, no display, no threads.
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (quantity, label) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for column, name in STAGES:
            points = columns.get(column.format(quantity), [])
            if points:
                epochs, values = zip(*points, strict=True)
                # As people count.
                epochs = [epoch + 1 for epoch in epochs]
                axes.plot(epochs, values, marker="o" if len(points) < 30 else None, markersize=3, label=name)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(target, dpi=120)
