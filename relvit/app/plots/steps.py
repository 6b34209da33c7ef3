"""Draw how many steps each patch of an image took, beside the image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from relvit.app.plots.style import save_figure


def plot_steps(image: np.ndarray, steps: np.ndarray, most: int, target: str | Path) -> None:
    """Draw an image and its map of steps into a PNG; colours are the same for all images of a model.

    Args:
        image: uint8 (height, width, 3).
        steps: number of steps of each patch, (rows, columns).
        most: the largest number of steps that the model takes.
        target: the PNG.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(image)
    # Draw the steps with the image's extent, so that both panels have the same size.
    drawn = right.imshow(steps, vmin=1, vmax=most, extent=left.get_images()[0].get_extent())
    for axes in (left, right):
        axes.set_axis_off()
    figure.colorbar(drawn, ax=right, label=f"steps, {steps.mean():.2f} in the mean", ticks=range(1, most + 1))
    save_figure(figure, target)
