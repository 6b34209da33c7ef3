"""Patch embedding for images of any size; sides must be multiples of the patch, and errors name the nearest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from timm.layers import Format, PatchEmbed, nchw_to
from torch import Tensor, nn

from relvit.layers.mixer import Leaf
from relvit.ops.checks import int_pair
from relvit.ops.tracing import is_compiling, is_exporting


class AnySizePatchEmbed(Leaf, PatchEmbed):
    """timm's `PatchEmbed` for images of every size whose sides are multiples of the patch.

    timm's class formats its error messages before it checks sizes, and so makes the sizes constants of a compiled
    graph, which then works for one size only. For arguments see `timm.layers.PatchEmbed`.

    Examples:
        >>> embed = AnySizePatchEmbed(img_size=224, patch_size=16, embed_dim=192, output_fmt="NHWC")
        >>> embed(torch.randn(2, 3, 64, 96)).shape  # (B, rows, columns, embed_dim)
        torch.Size([2, 4, 6, 192])

    Attributes:
        cropped_size: one image size that is allowed although its sides are not multiples of the patch: the convolution
            leaves out the pixels beyond the last whole patch, at the lower and the right edge.

    Raises:
        TypeError, ValueError: in `forward`, the input is not a batch of images, see `check_images`.
        ValueError: in `forward` or `set_input_size`, sides are not multiples of the patch, and `dynamic_img_pad` is
            False.
        TypeError, ValueError: in `set_input_size`, a size is not an integer, or is below 1.
    """

    cropped_size: tuple[int, int] | None = None

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set another size of images or patches as timm's `PatchEmbed`, unless `forward` would refuse the size."""
        size = self.img_size if img_size is None else int_pair("img_size", img_size, 1)
        patch = self.patch_size if patch_size is None else int_pair("patch_size", patch_size, 1)
        if not self.dynamic_img_pad and size is not None:
            check_divisible(size, patch, self.cropped_size)
        super().set_input_size(size, None if patch_size is None else patch)

    def forward(self, x: Tensor) -> Tensor:
        """Embed images (B, in_chans, height, width) as (B, rows, columns, embed_dim), or in another `output_fmt`."""
        check_images(x, self.proj)
        if self.dynamic_img_pad:
            height, width = x.shape[-2:]
            x = F.pad(x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))
        else:
            check_divisible(x.shape[-2:], self.patch_size, self.cropped_size)
            if is_exporting() and self.cropped_size is None:
                x = whole_patches(x, self.patch_size)
        x = self.proj(x)
        if self.flatten:
            x = x.flatten(2).transpose(1, 2)
        elif self.output_fmt != Format.NCHW:
            x = nchw_to(x, self.output_fmt)
        return self.norm(x)


class GridPatchEmbed(AnySizePatchEmbed):
    """`AnySizePatchEmbed` that returns patches as a grid, (B, rows, columns, dim), for blocks that take such tensors.

    A compiled model also accepts sides that are not multiples of the patch, and drops the pixels beyond the last whole
    patch, as timm's `PatchEmbed` does. If a graph for all image sizes checked the sides, Inductor (PyTorch 2.15) could
    not order the strides of the grid of patches.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Embed images (B, in_chans, height, width) as (B, rows, columns, embed_dim)."""
        return PatchEmbed.forward(self, x) if is_compiling() else super().forward(x)


class PatchSizes(Leaf):
    """Mixin before another library's patch embedding: sizes of patches, images and grids under timm's names."""

    convolution: ClassVar[str] = "projection"  # name of the attribute that holds the convolution
    img_size: tuple[int, int]  # height and width of images in training
    dynamic_img_pad: ClassVar[bool] = False

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return base_layer(getattr(self, self.convolution)).kernel_size

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches in training."""
        return self.dynamic_feat_size(self.img_size)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of patches of images of this size."""
        (height, width), (rows, columns) = img_size, self.patch_size
        return height // rows, width // columns


def whole_patches(x: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Reshape images (B, C, H, W) into patches and back, so that an ONNX graph refuses sides that are not multiples.

    An ONNX graph holds no checks of relvit, and its convolution would silently leave out the pixels beyond the last
    whole patch. With such pixels the reshape into patches fails, and so reports the wrong size.

    Examples:
        >>> whole_patches(torch.randn(2, 3, 64, 96), (16, 16)).shape
        torch.Size([2, 3, 64, 96])

    Args:
        x: the images.
        patch_size: (height, width) of a patch.

    Raises:
        RuntimeError: sides of the images are not multiples of the patch.
    """
    batch, channels, height, width = x.shape
    rows, columns = patch_size
    parts = x.reshape(batch, channels, height // rows, rows, width // columns, columns)
    return parts.reshape(batch, channels, height, width)


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer that an adapter of PEFT, such as LoRA's, wraps; any other module is returned itself.

    An adapter computes what the layer computes, but lacks the layer's attributes, such as `kernel_size`.
    """
    return getattr(module, "base_layer", module)


def check_images(images: Tensor, projection: nn.Module) -> None:
    """Raise TypeError or ValueError for anything but floating-point images (B, in_chans, height, width).

    `projection` is the layer that embeds patches; if it has no `in_channels`, any number of channels is allowed.
    """
    number = getattr(base_layer(projection), "in_channels", None)
    in_chans = "in_chans" if number is None else number
    if not isinstance(images, Tensor):
        # Only other tracers than timm's call this layer with a `Proxy`, so advise to use timm's tracer.
        traced = isinstance(images, torch.fx.Proxy)
        hint = ": to trace a model by torch.fx, use timm.models.create_feature_extractor" if traced else ""
        raise TypeError(f"images must be a tensor (B, {in_chans}, height, width), got {type(images).__name__}{hint}")
    if images.dim() != 4 or (number is not None and images.shape[1] != number):
        hint = "; for a single image give image[None]" if images.dim() == 3 else ""
        raise ValueError(f"images must be (B, {in_chans}, height, width), got {tuple(images.shape)}{hint}")
    if not images.is_floating_point():
        raise TypeError(
            f"images must be normalised floating numbers, got {images.dtype}: for bytes take images.float() / 255, "
            "minus the mean and divided by the std of the model's training"
        )


def check_divisible(
    size: Sequence[int],
    patch_size: tuple[int, int],
    cropped_size: tuple[int, int] | None = None,
    advice: str = "dynamic_img_pad=True, given to the model or set on its patch_embed, pads with zeros",
) -> None:
    """Raise a ValueError if images of this height and width do not divide into patches, and are not `cropped_size`.

    Examples:
        >>> check_divisible((64, 96), (16, 16))
    """
    height, width = size
    if cropped_size is not None and height == cropped_size[0] and width == cropped_size[1]:
        return
    for name, side, patch in zip(("height", "width"), (height, width), patch_size, strict=True):
        if side % patch != 0:
            below = side - side % patch
            near = f"{below} or {below + patch}" if below else f"{patch}"
            raise ValueError(f"image {name} {side} is not a multiple of the patch size {patch}: use {near} ({advice})")
