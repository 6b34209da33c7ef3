"""Centre crop of the protocol `field`: it continues an image beyond its edges, by reflection or in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image
from torchvision.transforms import v2

from relvit.utils.messages import check_choice

Fill = Literal["reflect", "grey"]
"""What surrounds images that are smaller than the field of view of protocol 'field'."""


class FieldCrop(v2.Transform):
    """Crop (height, width) from the centre of a PIL image, and fill the area beyond the edges of a smaller image.

    The crop, and the place of a smaller image in the result, are the same as in torchvision's CenterCrop.

    Args:
        size: Output size (height, width).
        fill: 'reflect' mirrors the image at its outermost pixels, repeatedly if necessary, as
            ``numpy.pad(mode='reflect')``; 'grey' fills with `mean`, rounded to 8 bits.
        mean: Mean of each channel, in units of the range 0..1.

    Raises:
        ValueError: `fill` is unknown.
    """

    def __init__(self, size: tuple[int, int], fill: Fill, mean: Sequence[float]) -> None:
        super().__init__()
        check_choice("fill", fill, get_args(Fill))
        self.size = size
        self.fill = fill
        self.grey: np.ndarray = np.array([min(255, round(255 * value)) for value in mean], np.uint8)

    def transform(self, inpt: Image.Image, params: dict[str, Any]) -> Image.Image:
        return Image.fromarray(self.take(np.asarray(inpt)))

    def take(self, pixels: np.ndarray, rows: int = 0) -> np.ndarray:
        """Crop an array whose axes `rows` and `rows` + 1 are an image's rows and columns; channels may follow."""
        grey = self.grey if pixels.ndim == rows + 3 else self.grey[0]
        for axis, size in enumerate(self.size, rows):
            length = pixels.shape[axis]
            first = round((length - size) / 2) if length >= size else -((size - length) // 2)
            index = np.arange(first, first + size)
            # The mirrored image repeats after 2 * `turn` pixels: `turn` pixels forwards, then `turn` pixels backwards.
            turn = max(1, length - 1)
            inside = turn - np.abs(index % (2 * turn) - turn) if length > 1 else np.zeros_like(index)
            pixels = pixels.take(inside, axis)
            if self.fill == "grey":
                np.moveaxis(pixels, axis, 0)[(index < 0) | (index >= length)] = grey
        return pixels

    def extra_repr(self) -> str:
        return f"size={self.size}, fill={self.fill!r}"
