"""Functions on a batch of images, a tensor or native patches: check, count, split into images, mirror."""

from typing import Any

import torch
from torch import Tensor

from relvit.utils.messages import listing

# The images of a batch are a tensor (B, C, H, W), if all have one size, or a dictionary with the patches of images of
# any shape, which `relvit.app.data.shape.NativeShapes.collate` makes.
ImageBatch = Tensor | dict[str, Any]


def pair_of(batch: Any, others: str) -> tuple[ImageBatch, Any]:
    """Return the images of a batch and what belongs to them: their labels or, to predict, their names.

    Raises:
        TypeError: The batch is not a pair; the message names the second part of the pair by `others`.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"a {type(batch).__name__}"
    if isinstance(batch, Tensor):
        found += f" of shape {tuple(batch.shape)}"
    elif isinstance(batch, dict):
        found += f" with {listing(list(batch))}"
    elif isinstance(batch, tuple | list):
        found += f" of {len(batch)}"
    raise TypeError(f"a batch must be a pair, (images, {others}), got {found}: let the dataset return such pairs")


def image_count(images: ImageBatch) -> int:
    """Return the number of images in a batch."""
    return len(images["patches"] if isinstance(images, dict) else images)


def images_of(images: ImageBatch) -> list[Tensor]:
    """Return the single images (C, H, W) of a batch, which may differ in size in a batch of patches."""
    if not isinstance(images, dict):
        return list(images)
    parts = zip(images["patches"], images["patch_coord"], images["patch_valid"], strict=True)
    return [image_of({"patches": patches[valid], "patch_coord": coord[valid]}) for patches, coord, valid in parts]


def image_of(image: ImageBatch) -> Tensor:
    """Return an image (C, H, W), put together from its patches if it is divided into them."""
    if not isinstance(image, dict):
        return image
    rows, columns = (image["patch_coord"].amax(0) + 1).tolist()
    _, height, width, channels = image["patches"].shape
    patches = image["patches"].new_zeros(rows, columns, height, width, channels)
    patches[image["patch_coord"].unbind(1)] = image["patches"]
    return patches.permute(4, 0, 2, 1, 3).reshape(channels, rows * height, columns * width)


def mirrored(images: ImageBatch) -> ImageBatch:
    """Mirror each image of a batch from left to right, in patches as well as in the order of the patches."""
    if not isinstance(images, dict):
        return images.flip(-1)
    coord, valid = images["patch_coord"], images["patch_valid"]
    last = coord[..., 1].amax(1, keepdim=True)
    columns = (last - coord[..., 1]).masked_fill(~valid, 0)
    return images | {"patches": images["patches"].flip(3), "patch_coord": torch.stack((coord[..., 0], columns), -1)}
