"""Draw a confusion matrix as a PNG; `relvit.app.training.class_metrics` computes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from relvit.app.plots.style import save_figure, shortened

# With more than `NUMBERED` classes, numbers in the cells would be illegible; with more than `NAMED`, names of classes.
NUMBERED, NAMED = 20, 60
# With more than this number of classes, neighbouring classes share a cell: the figure has no pixels for more cells, and
# Matplotlib would take eight times the memory of a large matrix.
CELLS = 1000
DPI = 150


def plot_confusion(confusion: np.ndarray, class_names: Sequence[str], target: str | Path) -> None:
    """Draw a confusion matrix into a PNG.

    The colour of a cell shows the square root of its proportion of the images of the true class, so that rare mistakes
    are visible, too. Cells show counts for up to 20 classes; rows and columns have names for up to 60 classes. With
    more than 1,000 classes a cell is the sum over neighbouring classes.

    Args:
        confusion: numbers of images by true class (rows) and predicted class (columns), (classes, classes).
        class_names: the name of each class.
        target: the PNG, between 600 and 1,800 pixels wide, so that each of 1,000 classes has at least a pixel.
    """
    classes = len(confusion)
    inches = float(np.clip(2.5 + 0.3 * classes, 4, 12))
    figure = Figure(figsize=(inches, inches * 0.9), layout="constrained", dpi=DPI)
    axes = figure.subplots()
    starts = np.arange(0, classes, -(-classes // CELLS))
    cells = np.add.reduceat(np.add.reduceat(confusion, starts, 0), starts, 1)
    proportions = cells / np.maximum(cells.sum(1, keepdims=True), 1)
    extent = (-0.5, classes - 0.5, classes - 0.5, -0.5)
    image = axes.imshow(proportions, cmap="Blues", norm=PowerNorm(0.5, 0, 1), extent=extent)
    axes.set(xlabel="predicted", ylabel="true")
    if classes <= NAMED:
        size = 9 if classes <= NUMBERED else 6
        names = [shortened(name) for name in class_names]
        axes.set_xticks(range(classes), names, rotation=90, fontsize=size)
        axes.set_yticks(range(classes), names, fontsize=size)
    if classes <= NUMBERED:
        for row, column in np.argwhere(confusion):
            colour = "white" if proportions[row, column] > 0.4 else "black"
            number = str(confusion[row, column])
            axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=8 - len(number) // 2)
    figure.colorbar(image, ax=axes, shrink=0.7, label="proportion of the true class")
    save_figure(figure, target, DPI)
