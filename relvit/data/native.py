"""Native shapes: each image as a sequence of patches within a budget of tokens, in batches of timm's NaFlex models."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify, RandomResizedCropToSequence, ResizeToSequence
from torch.utils.data import default_collate
from torchvision.transforms import v2

from relvit.data.transforms import ResizeToCover

# Patches, coordinates and padding of some images, as timm's `NaFlexVit` takes them; see `collate_native`.
NativeBatch = dict[str, Any]


def native_transform(transform: v2.Compose, patch_size: tuple[int, int], max_tokens: int) -> v2.Compose:
    """Turn a transform to images of one size into one to sequences of patches, which keep the shape of the image.

    timm's `ResizeToSequence` replaces the resizing: each image gets the largest size, in whole patches, that has its
    own aspect ratio (but for the rounding to patches) and `max_tokens` patches or fewer. Small images are enlarged, so
    all sequences are nearly as long as the budget and batches have little padding. Of random resized crops the area and
    the aspect ratio, relative to that of the image, stay random (timm's `RandomResizedCropToSequence`); shifts by up to
    an eighth stay shifts; centre crops are left out: evaluation sees the whole image.

    Args:
        transform: Of :func:`relvit.data.train_transform` or :func:`relvit.data.eval_transform`.
        patch_size: Height and width of a patch in pixels.
        max_tokens: Number of patches that no image exceeds.

    Returns:
        A transform from a PIL image to timm's dictionary of one image: 'patches' float32 (N, height, width, C),
        'patch_coord' int64 (N, 2), row and column of each, and 'patch_valid' bool (N,), all True.

    Raises:
        ValueError: A crop that has no such form, that of 'three-augment-crop'.
    """
    steps: list[Any] = []
    for step in transform.transforms:
        match step:
            case ResizeToCover():
                steps.append(ResizeToSequence(patch_size, max_tokens))
            case v2.CenterCrop():
                pass
            case v2.RandomCrop(padding_mode="constant"):
                steps.append(v2.RandomAffine(0, translate=(1 / 8, 1 / 8)))
            case v2.RandomCrop():
                raise ValueError("augment 'three-augment-crop' crops to one size: with native use 'three-augment'")
            case v2.RandomResizedCrop():
                steps.append(RandomResizedCropToSequence(patch_size, max_tokens, step.scale, ratio=(3 / 4, 4 / 3)))
            case _:
                steps.append(step)
    return v2.Compose([*steps, Patchify(patch_size, flatten_patches=False)])


def collate_native(items: Sequence[tuple[NativeBatch, Any]]) -> tuple[NativeBatch, Any]:
    """Collate images of `native_transform` with labels or names, by timm's `NaFlexCollator`.

    Returns:
        A dictionary as timm's loader makes it, padded to the longest sequence of the batch: 'patches' float32 (B, N,
        height, width, C), 'patch_coord' int64 (B, N, 2), 'patch_valid' bool (B, N), False for padding, 'seq_len' N; and
        'grid_size', rows and columns that no image of the batch exceeds. Then labels int64 (B,), or the list of names.
    """
    images, targets = zip(*items, strict=True)
    longest = max(len(image["patches"]) for image in images)
    batch, _ = NaFlexCollator(longest)([(image, 0) for image in images])
    return batch | {"grid_size": tuple((batch["patch_coord"].amax((0, 1)) + 1).tolist())}, default_collate(targets)


def empty_native(patch_size: tuple[int, int], channels: int) -> NativeBatch:
    """Return a batch of no image."""
    return {
        "patches": torch.empty(0, 1, *patch_size, channels),
        "patch_coord": torch.empty(0, 1, 2, dtype=torch.int64),
        "patch_valid": torch.empty(0, 1, dtype=torch.bool),
        "seq_len": 1,
        "grid_size": (1, 1),
    }


def token_budget(img_size: tuple[int, int], patch_size: tuple[int, int]) -> int:
    """Return the number of whole patches in an image of this size, 1 or more."""
    return max(1, img_size[0] // patch_size[0]) * max(1, img_size[1] // patch_size[1])


def model_size(
    img_size: tuple[int, int], native: bool, max_tokens: int | None, patch_size: tuple[int, int]
) -> tuple[int, int]:
    """Return the size of images that models are built for: `img_size`, or the largest square within `max_tokens`.

    Raises:
        ValueError: A budget below 1, or of images that are not native.
    """
    if max_tokens is None:
        return img_size
    if not native:
        raise ValueError(f"max_tokens {max_tokens} is for native images: set native, or leave max_tokens out (null)")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; give the number of patches of an image, such as 196")
    side = math.isqrt(max_tokens)
    return side * patch_size[0], side * patch_size[1]
