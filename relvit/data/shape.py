"""Shape of the images that a model gets: all of one size, or each of its own as patches within a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate
from torchvision.transforms import v2

from relvit.data.batches import ImageBatch
from relvit.data.native import collate_native, empty_native, model_size, native_transform, token_budget
from relvit.data.transforms import parse_size


class ImageShape(ABC):
    """Shape that all images of a data module or a model have in common.

    Attributes:
        img_size: (height, width) of the images that models are built for.
        fixed: whether all images have this size.
    """

    img_size: tuple[int, int]
    fixed: bool

    @abstractmethod
    def words(self) -> str:
        """Describe the shape, such as '288 x 288 px'."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the shape in plain values, as files keep it."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `relvit.data.ImageData` for this shape."""
        return {"img_size": self.img_size, "native": not self.fixed} | self.record()

    @abstractmethod
    def at_size(self, img_size: tuple[int, int]) -> ImageShape:
        """Return the shape for images of another size."""

    @abstractmethod
    def adapt(self, transform: v2.Compose) -> v2.Compose:
        """Turn a transform to images of `img_size` into one to images of this shape."""

    @abstractmethod
    def collate(self, items: Sequence[Any]) -> Any:
        """Make a batch of pairs of an image and its label or name."""

    @abstractmethod
    def empty(self, channels: int) -> ImageBatch:
        """Return a batch of no image."""


@dataclass(frozen=True)
class OneSize(ImageShape):
    """All images have one size: tensors float32 (C, height, width)."""

    img_size: tuple[int, int]
    fixed = True

    def words(self) -> str:
        return f"{self.img_size[0]} x {self.img_size[1]} px"

    def record(self) -> dict[str, Any]:
        return {"img_size": list(self.img_size)}

    def at_size(self, img_size: tuple[int, int]) -> OneSize:
        return OneSize(img_size)

    def adapt(self, transform: v2.Compose) -> v2.Compose:
        return transform

    def collate(self, items: Sequence[Any]) -> Any:
        return default_collate(items)

    def empty(self, channels: int) -> ImageBatch:
        return torch.empty(0, channels, *self.img_size)


@dataclass(frozen=True)
class NativeShapes(ImageShape):
    """Each image keeps its shape, as a sequence of patches; see `relvit.data.native`.

    Attributes:
        img_size: (height, width) of the largest square within the budget, or the size that gave the budget.
        patch_size: (height, width) of a patch.
        max_tokens: the number of patches that no image exceeds.
    """

    img_size: tuple[int, int]
    patch_size: tuple[int, int]
    max_tokens: int
    fixed = False

    def words(self) -> str:
        height, width = self.patch_size
        return f"native shapes of up to {self.max_tokens} patches of {height} x {width} px"

    def record(self) -> dict[str, Any]:
        return {"patch_size": list(self.patch_size), "max_tokens": self.max_tokens}

    def at_size(self, img_size: tuple[int, int]) -> NativeShapes:
        """Return the shape whose images have as many patches as this size at most."""
        return NativeShapes(img_size, self.patch_size, token_budget(img_size, self.patch_size))

    def adapt(self, transform: v2.Compose) -> v2.Compose:
        return native_transform(transform, self.patch_size, self.max_tokens)

    def collate(self, items: Sequence[Any]) -> Any:
        return collate_native(items)

    def empty(self, channels: int) -> ImageBatch:
        return empty_native(self.patch_size, channels)


def shape_of(values: Mapping[str, Any]) -> ImageShape:
    """Return the shape that the arguments of a data module give, or what `ImageShape.record` returned.

    Raises:
        KeyError, TypeError, ValueError: the values give none.
    """
    known = {name: values[name] for name in ("max_tokens", "patch_size") if name in values}
    if values.get("native", "max_tokens" in values):
        return image_shape(values.get("img_size", 224), native=True, **known)
    return image_shape(values["img_size"])


def image_shape(
    img_size: int | Sequence[int],
    native: bool = False,
    max_tokens: int | None = None,
    patch_size: int | Sequence[int] = 16,
) -> ImageShape:
    """Return the shape that the arguments of `relvit.data.ImageData` describe.

    Raises:
        ValueError: a size that is none, or a budget below 1 or without native images.
    """
    patch = parse_size(patch_size, "patch_size")
    size = model_size(parse_size(img_size), native, max_tokens, patch)
    if not native:
        return OneSize(size)
    return NativeShapes(size, patch, token_budget(size, patch) if max_tokens is None else max_tokens)
