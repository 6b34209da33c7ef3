"""Draw images with captions on one sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

LONGEST = 24
# Of the longer side of a picture, in pixels.
SIDE = 160


def picture_of(image: Tensor, mean: Sequence[float], std: Sequence[float], side: int = SIDE) -> np.ndarray:
    """Undo the normalisation of an image (C, H, W): uint8 (height, width, 3), at most `side` pixels long.

    Of an image without three channels, the first channel in grey.
    """
    means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, std))
    pixels = (255 * (image.float().cpu() * deviations + means)).round().clamp(0, 255).to(torch.uint8)
    if len(pixels) != 3:
        pixels = pixels[:1].expand(3, -1, -1)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((side, side))
    return np.asarray(picture)


def plot_sheet(images: Sequence[np.ndarray], captions: Sequence[str], target: str | Path, title: str = "") -> None:
    """Draw images with captions into a PNG, at most five in a row.

    Args:
        images: uint8 (height, width, 3), one or more; sizes may differ.
        captions: text above each; lines are cut to 24 characters.
        target: the PNG.
        title: above all.
    """
    columns = min(5, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(2.2 * columns, 2.6 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, image, caption in zip(grid.flat, images, captions, strict=False):
        axes.imshow(image)
        lines = [line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..." for line in caption.splitlines()]
        # Names may hold what Matplotlib takes for a formula.
        axes.set_title("\n".join(lines).replace("$", r"\$"), fontsize=9)
    figure.suptitle(title)
    figure.savefig(target, dpi=100)
