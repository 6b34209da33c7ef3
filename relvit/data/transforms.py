"""From a PIL image to a normalised tensor of one size, for training and for evaluation."""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from PIL import Image
from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
from torchvision.transforms import v2

from relvit.utils.messages import did_you_mean

Augment = Literal["none", "shift", "crop-flip", "resized-crop", "deit", "three-augment", "three-augment-crop"]

# What an augmentation brings along, unless the arguments say otherwise: (colour jitter, probability of erasing).
# With RandAugment DeiT uses no colour jitter: timm switches it off, whatever its --color-jitter says.
_BROUGHT_ALONG: dict[str, tuple[float, float]] = {
    "deit": (0.0, 0.25),
    "three-augment": (0.3, 0.0),
    "three-augment-crop": (0.3, 0.0),
}


# Of an image that a model is given, in pixels: a million patches, and gigabytes.
LARGEST_SIDE = 2**14


def parse_size(img_size: int | Sequence[int]) -> tuple[int, int]:
    """The (height, width) meant by one number (a square) or two.

    Raises:
        ValueError: Not a positive integer, nor two of them, or a side that cannot be meant.
    """
    sizes = (img_size, img_size) if isinstance(img_size, int) else img_size
    ok = isinstance(sizes, Sequence) and len(sizes) == 2
    if not ok or any(not isinstance(n, int) or isinstance(n, bool) or n <= 0 for n in sizes):
        raise ValueError(f"img_size is {img_size!r}; give a positive integer, or two as (height, width)")
    if max(sizes) > LARGEST_SIDE:
        raise ValueError(f"img_size {img_size} cannot be meant: sides go up to {LARGEST_SIDE} pixels")
    return sizes[0], sizes[1]


# Of images that are longer in relation to the size asked for, the ends are cut off: a line of 30,000 pixels would
# otherwise become gigabytes.
LONGEST = 64


class ResizeToCover(v2.Transform):
    """Resize a PIL image, keeping its aspect ratio, to the smallest size that covers (height, width).

    Bicubic with antialiasing; smaller images are enlarged. One side of the result is exact, the other is at least
    as long as asked, and at most 64 times as long: of longer images the middle is taken.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def transform(self, inpt: Image.Image, params: dict[str, Any]) -> Image.Image:
        height, width = self.size
        scale = max(height / inpt.height, width / inpt.width)
        longest = [math.ceil(LONGEST * height / scale), math.ceil(LONGEST * width / scale)]
        if inpt.height > longest[0] or inpt.width > longest[1]:
            kept = [min(inpt.height, longest[0]), min(inpt.width, longest[1])]
            inpt = v2.functional.center_crop(inpt, kept)
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
    color_jitter: float | None = None,
    random_erasing: float | None = None,
) -> v2.Compose:
    """Augmentation for training: a place in the image, changes of colour, normalisation, random erasing.

    ========================  ======================================================================================
    ``'none'``                the evaluation transform
    ``'shift'``               cover ``size``, pad with zeros by an eighth of it (at least 1), crop at random: for tiny
                              images that must not be mirrored, such as digits
    ``'crop-flip'``           the same and a horizontal flip: for tiny images of objects, such as CIFAR's
    ``'resized-crop'``        a random part (8 to 100 % of the area; its shape within 3:4 and 4:3 of the output's)
                              resized to ``size``, and a horizontal flip: for photographs
    ``'deit'``                the same, timm's RandAugment ``rand-m9-mstd0.5-inc1``, and erasing with probability 0.25
                              (DeiT, Touvron et al. 2021, arXiv 2012.12877, table 9)
    ``'three-augment'``       ``'resized-crop'``, then one of greyscale, solarisation and Gaussian blur, and colour
                              jitter 0.3 (DeiT III, Touvron et al. 2022, arXiv 2204.07118, section 3)
    ``'three-augment-crop'``  the same with DeiT III's simple random crop instead, which keeps most of the image:
                              cover ``size``, pad by four mirrored pixels, crop at random, flip
    ========================  ======================================================================================

    The random numbers are PyTorch's, and Python's for RandAugment and the three augmentations of DeiT III, which are
    timm's.

    Args:
        size: Output size, one number or (height, width).
        mean: Mean of each channel, in units of the range 0..1.
        std: Standard deviation of each channel, in the same units.
        augment: One of the names above; the last three are for images of three channels.
        crop_pct: Used by ``'none'`` only, as in :func:`eval_transform`.
        color_jitter: Brightness, contrast and saturation are multiplied by factors drawn from 1 - x to 1 + x, in any
            order; 0 leaves them as they are. None: as the table says.
        random_erasing: Probability that a rectangle (2 to 33 % of the area) of the normalised image becomes normal
            noise (Zhong et al. 2017, arXiv 1708.04896). None: as the table says.

    Returns:
        A picklable transform from a PIL image with ``len(mean)`` channels to a float32 tensor (C, height, width).

    Raises:
        ValueError: Unknown augment, or wrong size, mean, std, crop_pct, color_jitter or random_erasing.
    """
    if augment not in get_args(Augment):
        allowed = get_args(Augment)
        hint = did_you_mean(str(augment), allowed)
        raise ValueError(f"augment is {augment!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
    jitter, erasing = _BROUGHT_ALONG.get(augment, (0.0, 0.0))
    jitter = jitter if color_jitter is None else color_jitter
    erasing = erasing if random_erasing is None else random_erasing
    if jitter < 0:
        raise ValueError(f"color_jitter is {color_jitter}; give 0 (none) or more, such as 0.3")
    if not 0 <= erasing <= 1:
        raise ValueError(f"random_erasing is {random_erasing}; it is a probability, 0 <= random_erasing <= 1")
    if augment in _BROUGHT_ALONG and len(mean) != 3:
        raise ValueError(
            f"augment {augment!r} is for images of three channels, and these have {len(mean)}; use 'crop-flip'"
        )

    if augment == "none":
        *places, to_tensor, to_float, normalise = eval_transform(size, mean, std, crop_pct).transforms
        to_normalised = [to_tensor, to_float, normalise]
    else:
        places = _places(parse_size(size), augment)
        to_normalised = _to_tensor(mean, std)
    steps = [*places, *_colours(parse_size(size), mean, augment)]
    if jitter > 0:
        steps.append(v2.ColorJitter(jitter, jitter, jitter))
    steps += to_normalised
    if erasing > 0:
        # timm's bounds, which are the paper's; 'random' is noise of its own for every pixel, as in DeiT.
        steps.append(v2.RandomErasing(erasing, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random"))
    return v2.Compose(steps)


def _places(size: tuple[int, int], augment: Augment) -> list[v2.Transform]:
    """Which part of the image is seen, and whether it is mirrored."""
    height, width = size
    cover = ResizeToCover(size)
    match augment:
        case "shift" | "crop-flip":
            padding = (max(1, width // 8), max(1, height // 8))  # left and right, top and bottom
            shift = [cover, v2.RandomCrop(size, padding=padding)]
            return shift if augment == "shift" else [*shift, v2.RandomHorizontalFlip()]
        case "three-augment-crop":
            # a mirror shows at most what is beside the outermost pixels
            padding = (min(4, width - 1), min(4, height - 1))
            shift = v2.RandomCrop(size, padding=padding, padding_mode="reflect")
            return [cover, shift, v2.RandomHorizontalFlip()]
    shape = width / height
    crop = v2.RandomResizedCrop(
        size,
        ratio=(shape * 3 / 4, shape * 4 / 3),
        interpolation=v2.InterpolationMode.BICUBIC,
        antialias=True,
    )
    return [crop, v2.RandomHorizontalFlip()]


def _colours(size: tuple[int, int], mean: Sequence[float], augment: Augment) -> list[Any]:
    """The named policies, which are timm's own, with the arguments that timm's train script gives them."""
    grey = tuple(min(255, round(255 * value)) for value in mean)  # fills what a rotation or translation uncovers
    if augment == "deit":
        settings = {
            "translate_const": int(min(size) * 0.45),
            "img_mean": grey,
            "interpolation": Image.Resampling.BICUBIC,
            # Magnitudes are normal around 9 and clipped at 10, where timm asks to posterize to 0 bits: new versions of
            # Pillow refuse, older ones gave a black image.
            "magnitude_max": 9.99,
        }
        return [rand_augment_transform("rand-m9-mstd0.5-inc1", settings)]
    return [auto_augment_transform("3a", {"img_mean": grey})] if augment.startswith("three-augment") else []


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[v2.Transform]:
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise ValueError(
            f"mean is {tuple(mean)} and std {tuple(std)}; give one of each per channel, and std greater than zero"
        )
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
