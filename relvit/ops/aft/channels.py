"""Heads as channels of images, as convolutions want them, channels last."""

from __future__ import annotations

from torch import Tensor


def to_channels(part: Tensor, height: int, width: int) -> Tensor:
    """(B, heads, H W, c) to (B, H, W, heads c), as the tokens lie in memory already."""
    return part.transpose(1, 2).flatten(2).unflatten(1, (height, width))


def from_channels(image: Tensor, heads: int) -> Tensor:
    """The inverse of `to_channels`."""
    return image.flatten(1, 2).unflatten(-1, (heads, image.shape[-1] // heads)).transpose(1, 2)


def per_channel(weights: Tensor, image: Tensor) -> Tensor:
    """What is per head, (heads, ...), per channel of (B, H, W, channels)."""
    return weights.repeat_interleave(image.shape[-1] // weights.shape[0], 0)
