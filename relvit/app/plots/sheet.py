"""Draw images with captions on one sheet, and turn normalised tensors into pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from relvit.app.plots.style import save_figure, shortened

# The longer side of a picture has at most this number of pixels.
SIDE = 160


def picture_of(image: Tensor, mean: Sequence[float], std: Sequence[float], side: int = SIDE) -> np.ndarray:
    """Undo the normalisation of an image (C, H, W): uint8 (height, width, 3), at most `side` pixels long.

    An image without three channels is shown by its first channel, in grey.
    """
    means, deviations = (torch.tensor(values, device="cpu")[:, None, None] for values in (mean, std))
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
        captions: text above each image; lines are cut to 24 characters.
        target: the PNG.
        title: title of the figure.
    """
    lines = [[shortened(line) for line in caption.splitlines()] for caption in captions]
    columns = min(5, len(images))
    rows = math.ceil(len(images) / columns)
    # `picture`, `above` (the title), `cell` (a picture with its caption) and `size` (the figure) are in inches.
    picture, above = 2.0, 0.4
    cell = picture + 0.2, picture + 0.1 + 0.16 * max(len(caption) for caption in lines)
    size = max(cell[0] * columns, 0.1 * len(title)), cell[1] * rows + above
    figure = Figure(figsize=size)
    # Draw all images into one `Axes`, because Matplotlib takes long to draw many of them.
    axes = figure.add_axes((0, 0, 1, 1))
    for number, (image, caption) in enumerate(zip(images, lines, strict=True)):
        row, column = divmod(number, columns)
        bottom, middle = above + cell[1] * (row + 1) - 0.05, size[0] / 2 + cell[0] * (column - (columns - 1) / 2)
        height, width = (picture * side / max(image.shape[:2]) for side in image.shape[:2])
        axes.imshow(image, extent=(middle - width / 2, middle + width / 2, bottom, bottom - height))
        axes.text(middle, bottom - height - 0.04, "\n".join(caption), fontsize=9, ha="center", va="bottom")
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    figure.suptitle(title, y=1 - 0.1 / size[1])
    save_figure(figure, target)
