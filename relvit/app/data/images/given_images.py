"""Convert paths, PIL images, arrays and tensors given in Python to RGB, as `Predictor` and `DatasetData` take them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

from relvit.app.data.images.decode import UnreadableImageError, as_rgb, explain, load_rgb
from relvit.app.utils.shown_text import visible

ImageInput = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor

VALUES = "uint8, or floating point in 0..1 and not normalised"
ARRAYS = f"arrays are (height, width), (height, width, 3) or, with transparency, (height, width, 4), {VALUES}"
TENSORS = f"tensors are (3, height, width) or (1, height, width), {VALUES}"


class InputImages(Dataset[Any]):
    """Images of any kind, read when they are accessed. Items are ``(image, index)``: float32 (in_chans, H, W), int.

    Args:
        images: see `to_pil`.
        in_chans: number of channels that the model takes: 3, or 1 for grey.
        transform: from a PIL image of mode 'RGB' or 'L' to a tensor.
    """

    def __init__(self, images: Sequence[ImageInput], in_chans: int, transform: v2.Compose) -> None:
        self.images = images
        self.mode = "L" if in_chans == 1 else "RGB"
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(to_pil(self.images[index]).convert(self.mode)), index


def to_pil(image: ImageInput) -> Image.Image:
    """Convert one image to 8-bit RGB.

    Args:
        image: a path (see `relvit.app.data.load_rgb`); a PIL image of any mode, treated as if it came from a file (EXIF
            orientation, transparency on white, 16 bits); an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), or a
            tensor (3, H, W) or (1, H, W), uint8, or floating point in 0..1, which is rounded to 8 bits.

    Raises:
        UnreadableImageError: a ValueError: a file or a PIL image cannot be read.
        TypeError: `image` has another type, or a dtype that images cannot have.
        ValueError: an array or tensor has another shape, or floating-point values outside 0..1.
    """
    if isinstance(image, str | os.PathLike):
        return load_rgb(image)
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    elif isinstance(image, Tensor):
        image = _from_tensor(image)
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"an image is a path, a PIL image, an array or a tensor, got {type(image).__name__}; {ARRAYS}; {TENSORS}; "
            "several images are a list or tuple"
        )
    try:
        return as_rgb(image)
    except MemoryError:
        raise
    # Pillow decodes a file here, and raises errors of almost any type if the file is broken, so catch all of them.
    except Exception as error:
        path = getattr(image, "filename", "") or str(image)
        reason, fix = explain(error)
        raise UnreadableImageError(f"cannot use the image {visible(path)}: {reason}; {fix}", path, reason) from error


def _from_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or 0 in array.shape or array.shape[2:] not in ((), (3,), (4,)):
        raise ValueError(f"an array of shape {array.shape} is not an image; {ARRAYS}")
    if array.dtype.kind == "f":
        array = _rounded(array, "an array", ARRAYS)
    elif array.dtype != np.uint8:
        raise TypeError(f"an array of dtype {array.dtype} is not an image; {ARRAYS}")
    return Image.fromarray(array)


def _from_tensor(tensor: Tensor) -> Image.Image:
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3) or 0 in tensor.shape:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not an image; {TENSORS}")
    tensor = tensor.detach().cpu()
    if tensor.dtype.is_floating_point:
        tensor = torch.from_numpy(_rounded(tensor.float().numpy(), "a tensor", TENSORS))
    elif tensor.dtype != torch.uint8:
        raise TypeError(f"a tensor of dtype {tensor.dtype} is not an image; {TENSORS}")
    return to_pil_image(tensor)


def _rounded(values: np.ndarray, name: str, allowed: str) -> np.ndarray:
    """Convert floating-point values in 0..1 to 8 bits."""
    low, high = values.min(), values.max()
    # Every comparison with NaN is false, so this condition refuses NaN, too.
    if not (low >= 0 and high <= 1):
        raise ValueError(f"{name} with values from {low:g} to {high:g} is not an image; {allowed}")
    return (values.astype(np.float32) * 255).round().astype(np.uint8)
