"""Image shapes: one size for all images, or native shapes (NaFlex) with transforms that keep aspect ratios."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify, RandomResizedCropToSequence, ResizeToSequence
from torch import nn
from torch.utils.data import default_collate
from torchvision.transforms import v2

from relvit.app.data.batches import ImageBatch
from relvit.app.data.transforms import ResizeToCover, parse_size
from relvit.app.models import check_image_size, run_once
from relvit.app.utils.shown_text import size_text

# These are the arguments of `relvit.app.data.ImageData` for images that keep their shapes and are given to the model as
# a limited number of patches.
AS_PATCHES = ("native", "max_tokens", "patch_size")


@dataclass(frozen=True)
class ImageShape:
    """One size of all images of a data module or a model: tensors float32 (C, height, width).

    Attributes:
        img_size: (height, width) of the images that models are built for.
        fixed: Whether all images have this size.
    """

    img_size: tuple[int, int]
    fixed: ClassVar[bool] = True

    def words(self) -> str:
        """Describe the shape, such as '288 x 288 px'."""
        return f"{self.img_size[0]} x {self.img_size[1]} px"

    def record(self) -> dict[str, Any]:
        """Return the shape in plain values, as files keep it."""
        return {"img_size": list(self.img_size)}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `relvit.app.data.ImageData` for this shape."""
        return {"img_size": self.img_size, "native": not self.fixed} | self.record()

    def at_size(self, img_size: tuple[int, int]) -> ImageShape:
        """Return the shape for images of another size, which limits the number of patches of native shapes."""
        return ImageShape(img_size)

    def adapt(self, transform: v2.Compose) -> v2.Compose:
        """Change a transform that makes images of `img_size` into one that makes images of this shape."""
        return transform

    def collate(self, items: Sequence[tuple[Any, Any]]) -> tuple[ImageBatch, Any]:
        """Make a batch of pairs of an image and its label or name."""
        return default_collate(items)

    def empty(self, channels: int) -> ImageBatch:
        """Return a batch without images."""
        return torch.empty(0, channels, *self.img_size)

    def check_model(self, net: nn.Module, in_chans: int) -> None:
        """Run a model on one batch of this shape, before a long run starts; the model does not change.

        Args:
            net: a model of timm or relvit.
            in_chans: channels of the images.

        Raises:
            ValueError: the model cannot take such images; the message holds the reason, and what to do.
        """
        check_image_size(net, self.img_size, in_chans)


@dataclass(frozen=True)
class NativeShapes(ImageShape):
    """Each image keeps its shape, as a sequence of patches in timm's format for its NaFlex models.

    Attributes:
        img_size: (height, width) of the images that models are built for: the given size; or, if another `max_tokens`
            was given, the size of the largest grid of n x n patches with n * n <= `max_tokens`.
        patch_size: (height, width) of a patch.
        max_tokens: The largest number of patches of an image, by default the number of whole patches in `img_size`.
    """

    patch_size: tuple[int, int]
    max_tokens: int
    fixed = False

    def words(self) -> str:
        height, width = self.patch_size
        return f"native shapes of up to {self.max_tokens} patches of {height} x {width} px"

    def record(self) -> dict[str, Any]:
        return super().record() | {"patch_size": list(self.patch_size), "max_tokens": self.max_tokens}

    def at_size(self, img_size: tuple[int, int]) -> NativeShapes:
        return NativeShapes(img_size, self.patch_size, _whole_patches(img_size, self.patch_size))

    def adapt(self, transform: v2.Compose) -> v2.Compose:
        """Replace the resizing by timm's `ResizeToSequence` and divide the image into patches.

        Each image is resized, with its own aspect ratio up to rounding, to the largest size in whole patches that has
        at most `max_tokens` patches. Small images are enlarged, so all sequences have nearly `max_tokens` patches, and
        batches have little padding. Random resized crops still have a random area and aspect ratio, both relative to
        the image; random shifts by up to an eighth of the image stay; centre crops are left out, so evaluation sees the
        whole image.

        Args:
            transform: A transform of :func:`relvit.app.data.train_transform` or :func:`relvit.app.data.eval_transform`.

        Returns:
            A transform from a PIL image to timm's dictionary of one image, for patches of p x q pixels: 'patches'
            float32 (N, p, q, C), 'patch_coord' int64 (N, 2), row and column of each patch, and 'patch_valid' bool (N,),
            all True.

        Raises:
            ValueError: The transform has the crop of 'three-augment-crop', which crops to one size, so that images
                cannot keep their shapes.
        """
        sizes = self.patch_size, self.max_tokens
        steps: list[Any] = []
        for step in transform.transforms:
            match step:
                case ResizeToCover():
                    steps.append(ResizeToSequence(*sizes))
                case v2.CenterCrop():
                    pass
                case v2.RandomCrop(padding_mode="constant"):
                    steps.append(v2.RandomAffine(0, translate=(1 / 8, 1 / 8)))
                case v2.RandomCrop():
                    raise ValueError("augment 'three-augment-crop' crops to one size: with native use 'three-augment'")
                case v2.RandomResizedCrop():
                    steps.append(RandomResizedCropToSequence(*sizes, step.scale, ratio=(3 / 4, 4 / 3)))
                case _:
                    steps.append(step)
        return v2.Compose([*steps, Patchify(self.patch_size, flatten_patches=False)])

    def collate(self, items: Sequence[tuple[Any, Any]]) -> tuple[ImageBatch, Any]:
        """Make a batch with timm's `NaFlexCollator`, padded to the batch's longest sequence.

        Returns:
            A dictionary as timm's loader makes it, for patches of p x q pixels: 'patches' float32 (B, N, p, q, C),
            'patch_coord' int64 (B, N, 2), row and column of each patch, 'patch_valid' bool (B, N), False for padding,
            'seq_len' N; and 'grid_size', the largest numbers of rows and of columns of patches in the batch. The second
            part of the batch is the labels or the names of the images.
        """
        images, targets = zip(*items, strict=True)
        longest = max(len(image["patches"]) for image in images)
        batch, _ = NaFlexCollator(longest)([(image, 0) for image in images])
        grid_size = tuple((batch["patch_coord"].amax((0, 1)) + 1).tolist())
        return batch | {"grid_size": grid_size}, default_collate(targets)

    def empty(self, channels: int) -> ImageBatch:
        return {
            "patches": torch.empty(0, 1, *self.patch_size, channels),
            "patch_coord": torch.empty(0, 1, 2, dtype=torch.int64),
            "patch_valid": torch.empty(0, 1, dtype=torch.bool),
            "seq_len": 1,
            "grid_size": (1, 1),
        }

    def check_model(self, net: nn.Module, in_chans: int) -> None:
        cfg = getattr(net, "pretrained_cfg", None) or {}
        name = cfg.get("architecture") or type(net).__name__
        embed = getattr(net, "patch_embed", None) or getattr(net, "embeds", None)
        own, (height, width) = getattr(embed, "patch_size", None), self.patch_size
        if own is not None and tuple(own) != (height, width):
            raise ValueError(
                f"{name} has patches of {own[0]} x {own[1]} px, the data of {height} x {width} px: give "
                f"--data.patch_size {shlex.quote(size_text(own))}"
            )
        like = next(net.parameters())
        # The batch has two images of different shapes, so the model has to handle padding, too.
        batch = {
            "patches": torch.zeros(2, 2, height, width, in_chans, dtype=like.dtype, device=like.device),
            "patch_coord": torch.tensor([[[0, 0], [0, 1]], [[0, 0], [0, 0]]], device=like.device),
            "patch_valid": torch.tensor([[True, True], [True, False]], device=like.device),
            "seq_len": 2,
        }
        try:
            run_once(net, batch)
        except ValueError:
            # Errors of relvit's models already give the reason, so do not replace them.
            raise
        except Exception as error:
            raise ValueError(
                f"{name} takes no native images: use a relvit_* model, a retrofitted vit_*, one of timm's naflexvit_*, "
                "or --data.native false"
            ) from error


def shape_of(values: Mapping[str, Any]) -> ImageShape:
    """Return the shape that the arguments of a data module, or a record of `ImageShape.record`, describe.

    Raises:
        KeyError, TypeError, ValueError: The values do not describe a shape.
    """
    known = {name: values[name] for name in ("max_tokens", "patch_size") if name in values}
    if values.get("native", "max_tokens" in values):
        return image_shape(values["img_size"], native=True, **known)
    return image_shape(values["img_size"])


def remaining(arguments: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Return arguments of a data module without the number of patches, if another size or kind of shape is given."""
    replaced = not {"img_size", "native"}.isdisjoint(given)
    return {name: value for name, value in arguments.items() if not (replaced and name == "max_tokens")}


def image_shape(
    img_size: int | Sequence[int],
    native: bool = False,
    max_tokens: int | None = None,
    patch_size: int | Sequence[int] = 16,
) -> ImageShape:
    """Return the shape that the arguments of `relvit.app.data.ImageData` describe.

    Raises:
        ValueError: `img_size` or `patch_size` is neither a positive integer nor two of them; `max_tokens` is below 1,
            or is given without `native`.
    """
    size, patch = parse_size(img_size), parse_size(patch_size, "patch_size")
    if not native:
        if max_tokens is not None:
            raise ValueError(f"max_tokens {max_tokens} is for native images: set native, or leave it out (null)")
        return ImageShape(size)
    if max_tokens in (None, whole := _whole_patches(size, patch)):
        return NativeShapes(size, patch, whole)
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; give the number of patches of an image, such as 196")
    side = math.isqrt(max_tokens)
    return NativeShapes((side * patch[0], side * patch[1]), patch, max_tokens)


def _whole_patches(img_size: tuple[int, int], patch_size: tuple[int, int]) -> int:
    return max(1, img_size[0] // patch_size[0]) * max(1, img_size[1] // patch_size[1])
