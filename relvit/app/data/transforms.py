"""Transforms and augmentation: from a PIL image, or a batch in memory, to normalised tensors of one size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
from torch import Tensor
from torchvision.transforms import v2

from relvit.app.data.field import FieldCrop, Fill
from relvit.app.utils.number_types import NonNegativeFloat, PositiveShare, Share, check_ranges
from relvit.utils.messages import check_choice

# The size before the centre crop, `size / crop_pct`, may have sides of at most this number of pixels, the longest side
# that a JPEG file can have.
LONGEST_SIDE = 65_500
# A smaller `crop_pct` must be a mistake: it would enlarge images to a hundred times the pixels of the crop, or more.
LEAST_CROP = 0.1

SizeProtocol = Literal["crop", "resize", "field"]
"""How evaluation brings images to a size, see `eval_transform`."""
Augment = Literal["none", "shift", "crop-flip", "resized-crop", "deit", "three-augment", "three-augment-crop"]
"""Augmentation of training images, see `train_transform`."""

# These augmentations have this default colour jitter and this default probability of erasing; both are 0 for all other
# augmentations. DeiT has no colour jitter, because timm switches it off with RandAugment, whatever its option
# --color-jitter says.
_JITTER_AND_ERASING: dict[str, tuple[float, float]] = {
    "deit": (0.0, 0.25),
    "three-augment": (0.3, 0.0),
    "three-augment-crop": (0.3, 0.0),
}

# Image sizes with a side of more than this number of pixels are refused, because such sizes must be a mistake.
LARGEST_SIDE = 2**14

# If a side of the resized image is more than this many times as long as the same side of the output, its ends are not
# computed. Otherwise an image of 1 x 30,000 pixels would be enlarged to gigabytes.
LONGEST = 64


def parse_size(img_size: int | Sequence[int], name: str = "img_size") -> tuple[int, int]:
    """Convert a size, one number (a square) or two, to (height, width); messages call the size `name`.

    Raises:
        ValueError: The size is neither a positive integer nor two of them, or a side is above LARGEST_SIDE.
    """
    sizes = (img_size, img_size) if isinstance(img_size, int) else img_size
    ok = isinstance(sizes, Sequence) and len(sizes) == 2
    if not ok or any(not isinstance(n, int) or isinstance(n, bool) or n <= 0 for n in sizes):
        raise ValueError(f"{name} is {img_size!r}; give a positive integer, or two as (height, width)")
    if max(sizes) > LARGEST_SIDE:
        raise ValueError(f"{name} is {img_size}; give sides of at most {LARGEST_SIDE} pixels")
    return sizes[0], sizes[1]


class ResizeToCover(v2.Transform):
    """Resize a PIL image, keeping its aspect ratio, to the smallest size that covers (height, width), as timm does.

    The interpolation is bicubic with antialiasing; smaller images are enlarged. One side of the result has exactly the
    requested length, the other side is at least as long as requested. If the other side is more than 64 times as long
    as requested, only the middle of the image is computed.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def transform(self, inpt: Image.Image, params: dict[str, Any]) -> Image.Image:
        (height, width), made = self.sizes((inpt.height, inpt.width))
        top, left = (height - made[0]) // 2, (width - made[1]) // 2
        # x0, x1, y0 and y1 are the edges of the middle part that is computed, in pixels of the given image.
        x0, x1 = (edge * inpt.width / width for edge in (left, left + made[1]))
        y0, y1 = (edge * inpt.height / height for edge in (top, top + made[0]))
        if made[0] < inpt.height <= height:
            # The middle must be equal to the middle of the whole enlarged image. Pillow resizes in one direction, clips
            # the values to 0...255, then resizes in the other direction, so the order of the directions matters. Pillow
            # would resize the whole image horizontally first. The middle alone has fewer rows than the given image, so
            # Pillow 13 would resize it vertically first. Therefore resize horizontally here.
            inpt, x0, x1 = inpt.resize((width, inpt.height), Image.Resampling.BICUBIC), 0, width
        return inpt.resize(made[::-1], Image.Resampling.BICUBIC, box=(x0, y0, x1, y1))

    def sizes(self, stored: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return height and width of the whole image as it would be resized, and of the middle that is computed."""
        height, width = self.size
        if height == width:
            # For squares timm uses torchvision's Resize, which drops the fraction of a pixel of the longer side.
            whole = int(height * stored[0] / min(stored)), int(width * stored[1] / min(stored))
        else:
            # For other shapes timm uses its own ResizeKeepRatio, which rounds.
            ratio = min(stored[0] / height, stored[1] / width)
            whole = round(stored[0] / ratio), round(stored[1] / ratio)
        # `CenterCrop` rounds a half to an even number, so leave out an even number of pixels on either side: the crop
        # then has the same pixels as the crop of the whole image.
        made = tuple(
            side - max(0, side - LONGEST * asked) // 4 * 4 for side, asked in zip(whole, self.size, strict=True)
        )
        return whole, made

    def extra_repr(self) -> str:
        return f"size={self.size}"


def eval_transform(
    size: int | Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: PositiveShare = 1.0,
    protocol: SizeProtocol = "crop",
    trained_size: int | Sequence[int] | None = None,
    fill: Fill | None = None,
    squash: int | Sequence[int] | None = None,
) -> v2.Compose:
    """Bring an image to a size for evaluation, by default as timm does, and normalise.

    `ImageData` (for all data modules), `Predictor` and `at_size` (for `relvit resolutions`) call this function.

    ============  ==================================================================================================
    ``'crop'``    resize so that the image covers ``floor(size / crop_pct)``, crop ``size`` from the centre
    ``'resize'``  the whole image squashed to ``size`` (timm's crop mode 'squash' with ``crop_pct`` 1)
    ``'field'``   resize as 'crop' does for ``trained_size``, whatever ``size`` is, so that objects keep the scale
                  that they had in training, then crop ``size`` from the centre; beyond its edges the image is
                  continued, see ``fill``
    ============  ==================================================================================================

    Args:
        size: Output size, one number or (height, width).
        mean: Mean of each channel, in units of the range 0..1.
        std: Standard deviation of each channel, in the same units.
        crop_pct: Share of the resized image's side that the crop keeps; without effect for 'resize'.
        protocol: One of the names above.
        trained_size: Image size in training; only 'field' needs it.
        fill: What 'field' shows beyond the image: 'reflect' (the image mirrored; the default) or 'grey' (``mean``).
        squash: Another size, to which the result is squashed, for models that only take squares. None: the result has
            ``size``.

    Returns:
        A picklable transform from a PIL image with ``len(mean)`` channels to a float32 tensor (C, height, width), of
        the size ``squash`` if there is one.

    Raises:
        ValueError: `protocol` or `fill` is unknown; a size is neither a positive integer nor two of them; or a number
            is out of its range.
        ValueError: `protocol` is 'field', and there is no `trained_size`; or `fill` is given with another protocol.
    """
    check_ranges(eval_transform, locals())
    check_choice("protocol", protocol, get_args(SizeProtocol))
    size = parse_size(size)
    if fill is not None and protocol != "field":
        raise ValueError(f"fill {fill!r} is for protocol 'field', not {protocol!r}: leave it out")
    squashed = [] if squash is None else [_squash(parse_size(squash, "squash"))]
    if protocol == "resize":
        # Resize the image directly to the size `squash`, if it is given, because resizing it twice would blur it.
        steps, squashed = squashed or [_squash(size)], []
    elif protocol == "field":
        if trained_size is None:
            raise ValueError(
                "protocol 'field' keeps the scale that objects had in training: give trained_size, the image size there"
            )
        steps = [
            ResizeToCover(_before_crop(parse_size(trained_size), crop_pct)),
            FieldCrop(size, fill or "reflect", mean),
        ]
    else:
        steps = [ResizeToCover(_before_crop(size, crop_pct)), v2.CenterCrop(size)]
    return v2.Compose([*steps, *squashed, *_to_tensor(mean, std)])


def _squash(size: tuple[int, int]) -> v2.Resize:
    return v2.Resize(size, v2.InterpolationMode.BICUBIC, antialias=True)


def _before_crop(size: tuple[int, int], crop_pct: float) -> tuple[int, int]:
    before = math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)
    if crop_pct < LEAST_CROP or max(before) > LONGEST_SIDE:
        raise ValueError(
            f"crop_pct {crop_pct:g} resizes images to {max(before):,} pixels before the crop: give {LEAST_CROP:g} to "
            f"1, with which they are at most {LONGEST_SIDE:,}; usual values are 0.8 to 1"
        )
    return before


def train_transform(
    size: int | Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    augment: Augment,
    crop_pct: PositiveShare = 1.0,
    color_jitter: NonNegativeFloat | None = None,
    random_erasing: Share | None = None,
) -> v2.Compose:
    """Augmentation for training: a random crop, changes of colour, normalisation, random erasing.

    ========================  ======================================================================================
    ``'none'``                the evaluation transform
    ``'shift'``               cover ``size``, pad with zeros by an eighth of it (at least 1), crop at random: for tiny
                              images that must not be mirrored, such as digits
    ``'crop-flip'``           ``'shift'`` and a random horizontal flip: for tiny images of objects, such as CIFAR's
    ``'resized-crop'``        a random part (8 to 100 % of the area; its shape within 3:4 and 4:3 of the output's)
                              resized to ``size``, and a random horizontal flip: for photographs
    ``'deit'``                ``'resized-crop'``, timm's RandAugment ``rand-m9-mstd0.5-inc1``, and erasing with
                              probability 0.25 (DeiT, Touvron et al. 2021, arXiv 2012.12877, table 9)
    ``'three-augment'``       ``'resized-crop'``, then one of greyscale, solarisation and Gaussian blur, and colour
                              jitter 0.3 (DeiT III, Touvron et al. 2022, arXiv 2204.07118, section 3)
    ``'three-augment-crop'``  ``'three-augment'``, but with DeiT III's simple random crop, which keeps most of the
                              image: cover ``size``, pad by four mirrored pixels, crop at random
    ========================  ======================================================================================

    Random numbers come from PyTorch's generator. Only RandAugment and the three augmentations of DeiT III, which timm
    implements, use the generators of Python and NumPy.

    Args:
        size, mean, std: See :func:`eval_transform`.
        augment: One of the names above; the last three are for images of three channels.
        crop_pct: Used by ``'none'`` only, as in :func:`eval_transform`.
        color_jitter: A number x: brightness, contrast and saturation are multiplied by random factors from 1 - x to 1 +
            x, in random order; 0: no jitter. None: the default of `augment`, see the table.
        random_erasing: Probability that a rectangle (2 to 33 % of the area) of the normalised image becomes normal
            noise (Zhong et al. 2017, arXiv 1708.04896). None: the default of `augment`.

    Returns:
        A picklable transform from a PIL image with ``len(mean)`` channels to a float32 tensor (C, height, width).

    Raises:
        ValueError: `augment` is unknown, or is one of the last three while the images do not have three channels.
        ValueError: `size` is neither a positive integer nor two of them, or another number is out of its range.
    """
    check_ranges(train_transform, locals())
    check_choice("augment", augment, get_args(Augment))
    jitter, erasing = _JITTER_AND_ERASING.get(augment, (0.0, 0.0))
    jitter = jitter if color_jitter is None else color_jitter
    erasing = erasing if random_erasing is None else random_erasing
    if augment in _JITTER_AND_ERASING and len(mean) != 3:
        raise ValueError(
            f"augment {augment!r} is for images of three channels, and these have {len(mean)}; use 'crop-flip'"
        )

    size = parse_size(size)
    steps = eval_transform(size, mean, std, crop_pct).transforms[:2] if augment == "none" else _crop(size, augment)
    if augment not in ("none", "shift"):
        steps.append(v2.RandomHorizontalFlip())
    if augment in _JITTER_AND_ERASING:
        steps.append(_colours(size, mean, augment))
    if jitter > 0:
        steps.append(v2.ColorJitter(jitter, jitter, jitter))
    steps += _to_tensor(mean, std)
    if erasing > 0:
        # The limits of area and aspect ratio are the same as in timm and the paper; 'random' fills every pixel with a
        # separate random value, as DeiT does.
        steps.append(v2.RandomErasing(erasing, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random"))
    return v2.Compose(steps)


def _crop(size: tuple[int, int], augment: Augment) -> list[v2.Transform]:
    height, width = size
    if augment in ("shift", "crop-flip"):
        padding = (max(1, width // 8), max(1, height // 8))
        return [ResizeToCover(size), v2.RandomCrop(size, padding=padding)]
    if augment == "three-augment-crop":
        # Reflection can add fewer pixels on each side than the image has, so sizes below 5 pixels get less padding.
        padding = (min(4, width - 1), min(4, height - 1))
        return [ResizeToCover(size), v2.RandomCrop(size, padding=padding, padding_mode="reflect")]
    ratio = (width / height * 3 / 4, width / height * 4 / 3)
    return [v2.RandomResizedCrop(size, ratio=ratio, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)]


def _colours(size: tuple[int, int], mean: Sequence[float], augment: Augment) -> Any:
    """Augmentation policy of timm, with the arguments that timm's train script gives it."""
    # timm's rotations and translations fill the border with this colour.
    grey = tuple(min(255, round(255 * value)) for value in mean)
    if augment != "deit":
        return auto_augment_transform("3a", {"img_mean": grey})
    settings = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": grey,
        "interpolation": Image.Resampling.BICUBIC,
        # Magnitudes are normally distributed around 9, and clipped below 10: at 10 timm would posterize to 0 bits,
        # which new versions of Pillow refuse and old versions turn into a black image.
        "magnitude_max": 9.99,
    }
    return rand_augment_transform("rand-m9-mstd0.5-inc1", settings)


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[v2.Transform]:
    right = all(0 <= number <= 1 for number in mean) and all(0 < number < math.inf for number in std)
    if len(mean) != len(std) or not mean or not right:
        raise ValueError(
            f"mean is {tuple(mean)} and std {tuple(std)}; give one of each per channel, for images with values from 0 "
            "to 1: mean from 0 to 1, std greater than zero"
        )
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]


@dataclass(eq=False)
class BatchTransform:
    """Transform a whole batch at once, with the same result as a transform of single images, see :meth:`like`.

    If images are resized, pixels differ from Pillow's by rounding. `tools/loading.py` measures how much faster a
    transform of whole batches is.

    Args:
        resized: Height and width to which the images are resized first.
        field: A crop after the resizing that continues images beyond their edges; None: there is no such crop.
        size: Height and width of the result.
        padding: The number of columns that are added at the left and again at the right, and the number of rows that
            are added at the top and again at the bottom, before a random crop; None: the centre is cropped.
        flip: Probability that an image is mirrored.
        mean: Mean of red, green and blue, in units of the range 0..255, (3, 1, 1).
        std: Standard deviation of red, green and blue, in the same units, (3, 1, 1).
    """

    resized: tuple[int, int]
    field: FieldCrop | None
    size: tuple[int, int]
    padding: tuple[int, int] | None
    flip: float
    mean: Tensor
    std: Tensor

    @classmethod
    def like(cls, transform: v2.Compose, stored: tuple[int, int]) -> "BatchTransform | None":
        """Build the equivalent of a transform for batches of colour images of the size `stored`.

        Return None if there is no equivalent: for transforms other than `eval_transform` and `train_transform` with
        'none', 'shift' or 'crop-flip', and for images so long that `ResizeToCover` would leave out their ends.
        """
        match getattr(transform, "transforms", None):
            case [*steps, v2.PILToTensor(), v2.ToDtype(scale=True), v2.Normalize() as normalise]:
                pass
            case _:
                return None
        resized, field, size, padding, flip = stored, None, None, None, 0.0
        match steps:
            case [ResizeToCover() as cover, *steps]:
                resized, made = cover.sizes(stored)
                if made != resized:
                    return None
            case [v2.Resize(size=[height, width], interpolation=v2.InterpolationMode.BICUBIC, antialias=True), *steps]:
                resized = height, width
        match steps:
            case [FieldCrop() as field, *steps]:
                size = field.size
            case [v2.CenterCrop(size=[height, width]), *steps]:
                if height > resized[0] or width > resized[1]:
                    return None
                size = height, width
            case [v2.RandomCrop(padding_mode="constant", fill=0, pad_if_needed=False) as crop, *steps]:
                left, right, above, below = crop.padding or (0, 0, 0, 0)
                if (left, above) != (right, below):
                    return None
                size, padding = tuple(crop.size), (left, above)
        match steps:
            case [v2.RandomHorizontalFlip(p=flip), *steps]:
                pass
        # Steps remain if this class does not know them, or if their order is unexpected.
        if steps:
            return None
        mean, std = (255 * torch.tensor(each)[:, None, None] for each in (normalise.mean, normalise.std))
        return cls(resized, field, size or resized, padding, flip, mean, std)

    def __call__(self, images: Tensor) -> Tensor:
        """Transform uint8 (B, height, width, 3), of any size, to float32 (B, 3, H, W), of the size of the result."""
        B, (H, W) = len(images), self.size
        if tuple(images.shape[1:3]) != self.resized:
            bicubic = v2.InterpolationMode.BICUBIC
            images = v2.functional.resize(images.permute(0, 3, 1, 2), list(self.resized), bicubic, antialias=True)
            images = images.permute(0, 2, 3, 1)
        if self.field is not None:
            images = torch.from_numpy(self.field.take(images.numpy(), rows=1))
        rows, columns = torch.arange(H).expand(B, H), torch.arange(W).expand(B, W)
        if self.flip:
            columns = torch.where(torch.rand(B, 1) < self.flip, W - 1 - columns, columns)
        pixels = _pack(images)
        free = pixels.shape[1] - H, pixels.shape[2] - W
        if self.padding is None:
            # Use `round`, as torchvision's CenterCrop does, to crop the same pixels.
            rows, columns = rows + round(free[0] / 2), columns + round(free[1] / 2)
        else:
            left, above = self.padding
            pixels = F.pad(pixels, (left, left, above, above))
            rows = rows + torch.randint(free[0] + 2 * above + 1, (B, 1))
            columns = columns + torch.randint(free[1] + 2 * left + 1, (B, 1))
        indices = rows[:, :, None] * pixels.shape[2] + columns[:, None]
        chosen = pixels.flatten(1).gather(1, indices.flatten(1)).view(B, H, W, 1).view(torch.uint8)[..., :3]
        images = chosen.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return images.sub_(self.mean).div_(self.std)


def _pack(images: Tensor) -> Tensor:
    """Pack uint8 (B, H, W, 3) to int32 (B, H, W), so that a pixel is gathered as one number."""
    packed = np.zeros((*images.shape[:3], 4), np.uint8)
    for channel in range(3):  # Copying channel by channel is faster than copying all at once.
        packed[..., channel] = images[..., channel]
    return torch.from_numpy(packed).view(torch.int32).squeeze(-1)
