"""From a PIL image to a normalised tensor of one size, for training and for evaluation."""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torchvision.transforms import v2

from relvit.names import did_you_mean

Augment = Literal["none", "shift", "crop-flip", "resized-crop"]


def parse_size(img_size: int | Sequence[int]) -> tuple[int, int]:
    """The (height, width) meant by one number (a square) or two.

    Raises:
        ValueError: Not a positive integer, nor two of them.
    """
    sizes = (img_size, img_size) if isinstance(img_size, int) else img_size
    ok = isinstance(sizes, Sequence) and len(sizes) == 2
    if not ok or any(not isinstance(n, int) or isinstance(n, bool) or n <= 0 for n in sizes):
        raise ValueError(f"img_size is {img_size!r}; give a positive integer, or two as (height, width)")
    return sizes[0], sizes[1]


class ResizeToCover(v2.Transform):
    """Resize a PIL image, keeping its aspect ratio, to the smallest size that covers (height, width).

    Bicubic with antialiasing; smaller images are enlarged. One side of the result is exact, the other is at least
    as long as asked.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def transform(self, inpt: Image.Image, params: dict[str, Any]) -> Image.Image:
        height, width = self.size
        scale = max(height / inpt.height, width / inpt.width)
        # rounding may not take a pixel from the side that decides the scale
        covering = [max(height, round(inpt.height * scale)), max(width, round(inpt.width * scale))]
        if covering == [inpt.height, inpt.width]:
            return inpt
        return v2.functional.resize(inpt, covering, v2.InterpolationMode.BICUBIC, antialias=True)

    def extra_repr(self) -> str:
        return f"size={self.size}"


def eval_transform(
    size: int | Sequence[int], mean: Sequence[float], std: Sequence[float], crop_pct: float = 1.0
) -> v2.Compose:
    """Resize so that the image covers ``floor(size / crop_pct)``, as timm does, and crop ``size`` from the centre.

    Args:
        size: Output size, one number or (height, width).
        mean: Mean of each channel, in units of the range 0..1.
        std: Standard deviation of each channel, in the same units.
        crop_pct: Share of the resized image's side that the crop keeps, in (0, 1].

    Returns:
        A picklable transform from a PIL image with ``len(mean)`` channels to a float32 tensor (C, height, width).

    Raises:
        ValueError: Wrong size, mean, std or crop_pct.
    """
    height, width = parse_size(size)
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct is {crop_pct}; it is the share of the side that is kept, 0 < crop_pct <= 1")
    # 1e-9: 63 / 0.9 is 70 but for the rounding of floats
    covered = (math.floor(height / crop_pct + 1e-9), math.floor(width / crop_pct + 1e-9))
    return v2.Compose([ResizeToCover(covered), v2.CenterCrop((height, width)), *_to_tensor(mean, std)])


def train_transform(
    size: int | Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    augment: Augment,
    crop_pct: float = 1.0,
) -> v2.Compose:
    """Augmentation for training.

    ====================  ==========================================================================================
    ``'none'``            the evaluation transform
    ``'shift'``           cover ``size``, pad with zeros by an eighth of it (at least 1), crop at random: for tiny
                          images that must not be mirrored, such as digits
    ``'crop-flip'``       the same and a horizontal flip: for tiny images of objects, such as CIFAR's
    ``'resized-crop'``    a random part (8 to 100 % of the area; its shape within 3:4 and 4:3 of the output's)
                          resized to ``size``, and a horizontal flip: for photographs
    ====================  ==========================================================================================

    Args:
        size: Output size, one number or (height, width).
        mean: Mean of each channel, in units of the range 0..1.
        std: Standard deviation of each channel, in the same units.
        augment: One of the names above.
        crop_pct: Used by ``'none'`` only, as in :func:`eval_transform`.

    Returns:
        A picklable transform from a PIL image with ``len(mean)`` channels to a float32 tensor (C, height, width).

    Raises:
        ValueError: Unknown augment, or wrong size, mean, std or crop_pct.
    """
    height, width = parse_size(size)
    shape = width / height
    padding = (max(1, width // 8), max(1, height // 8))  # left and right, top and bottom
    shift = [ResizeToCover((height, width)), v2.RandomCrop((height, width), padding=padding)]
    match augment:
        case "none":
            return eval_transform(size, mean, std, crop_pct)
        case "shift":
            steps = shift
        case "crop-flip":
            steps = [*shift, v2.RandomHorizontalFlip()]
        case "resized-crop":
            crop = v2.RandomResizedCrop(
                (height, width),
                ratio=(shape * 3 / 4, shape * 4 / 3),
                interpolation=v2.InterpolationMode.BICUBIC,
                antialias=True,
            )
            steps = [crop, v2.RandomHorizontalFlip()]
        case _:
            allowed = get_args(Augment)
            hint = did_you_mean(str(augment), allowed)
            raise ValueError(f"augment is {augment!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
    return v2.Compose([*steps, *_to_tensor(mean, std)])


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[v2.Transform]:
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise ValueError(
            f"mean is {tuple(mean)} and std {tuple(std)}; give one of each per channel, and std greater than zero"
        )
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
