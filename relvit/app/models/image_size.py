"""Check with one image, before a long run, that a model takes a size, in whole patches; resize timm's models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from relvit.app.models.model_factory import model_arguments
from relvit.app.utils.shown_text import size_text
from relvit.layers import check_divisible


def check_image_size(
    net: nn.Module, img_size: Sequence[int], in_chans: int, trained_size: int | Sequence[int] | None = None
) -> None:
    """Run the model on one black image of this size: no attribute of timm's models tells which sizes they take.

    Examples:
        >>> check_image_size(timm.create_model("relvit_tiny", depth=1), (64, 96), in_chans=3)

    Args:
        net: a model of timm or relvit; not changed.
        img_size: (height, width).
        in_chans: channels of the images.
        trained_size: the size that the model was built for, for the error message.

    Raises:
        ValueError: the model cannot take such images; the message holds the reason, and what to do.
    """
    error = _failure(net, img_size, in_chans)
    if error is None:
        _check_whole_patches(net, img_size)
        return
    if isinstance(error, ValueError | MemoryError):
        # Errors of relvit's models already say what to do, so do not replace them.
        raise error
    cfg = getattr(net, "pretrained_cfg", None) or {}
    architecture = cfg.get("architecture")
    advice = []
    own = (trained_size, trained_size) if isinstance(trained_size, int) else trained_size
    known = [size for size in (own, cfg.get("input_size", ())[1:]) if size]
    if fitting := next((size for size in known if _failure(net, size, in_chans) is None), None):
        advice.append(f"give img_size {size_text(fitting)}")
    if architecture and "dynamic_img_size" in model_arguments(architecture) and not net.dynamic_img_size:
        advice.append("train it with --model.model_kwargs.dynamic_img_size true")
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    raise ValueError(
        f"{architecture or type(net).__name__} cannot take images of {img_size[0]} x {img_size[1]} px ({reason}): "
        f"{' or '.join(advice) or 'choose another img_size'}"
    ) from error


def _check_whole_patches(net: nn.Module, img_size: Sequence[int]) -> None:
    """Refuse a size of which a patch embedding of timm would leave out the pixels beyond the last whole patch."""
    embed = getattr(net, "patch_embed", None)
    conv = getattr(embed, "proj", None)
    # Pixels beyond the last whole patch need not be lost if there is no convolution, or if it makes patches that
    # overlap or have padding.
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size != conv.stride or any(conv.padding):
        return
    # These pixels are not lost either if the embedding pads images, or if the kernel of the convolution is not as large
    # as a patch, because the convolution then follows other convolutions.
    if getattr(embed, "dynamic_img_pad", False) or conv.kernel_size != patch_size_of(net):
        return
    architecture = (getattr(net, "pretrained_cfg", None) or {}).get("architecture")
    pads = architecture and "dynamic_img_pad" in model_arguments(architecture)
    advice = {} if pads else {"advice": "the model would leave out the rest"}
    check_divisible(img_size, conv.kernel_size, **advice)


def at_image_size(
    net: nn.Module, img_size: Sequence[int], in_chans: int, trained_size: int | Sequence[int] | None = None
) -> nn.Module:
    """Return the model itself if it takes images of this size, otherwise a copy with timm's `set_input_size` applied.

    `set_input_size` interpolates position embeddings and tables, as timm's evaluation does for another `img_size`. For
    arguments and errors see `check_image_size`.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", depth=1)  # takes 224 x 224 pixels alone
        >>> at_image_size(vit, (64, 96), 3)(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 1000])
    """
    try:
        check_image_size(net, img_size, in_chans, trained_size)
    except ValueError:
        # Refuse sides that are not multiples of the patch: timm would leave out the pixels beyond the last whole patch.
        if not hasattr(net, "set_input_size") or any(n % p for n, p in zip(img_size, patch_size_of(net), strict=True)):
            raise
        net = copy.deepcopy(net)
        net.set_input_size(tuple(img_size))
        check_image_size(net, img_size, in_chans, trained_size)
    return net


def patch_size_of(net: nn.Module) -> tuple[int, int]:
    """Return height and width of a model's patches in pixels; (1, 1) for a model without a patch embedding.

    Examples:
        >>> patch_size_of(timm.create_model("relvit_tiny", depth=1))
        (16, 16)
    """
    # Some models of timm store one number for both sides, so return two in any case.
    embed = getattr(net, "patch_embed", None) or getattr(net, "embeds", None)
    return to_2tuple(getattr(embed, "patch_size", 1))


def _failure(net: nn.Module, img_size: Sequence[int], in_chans: int) -> Exception | None:
    """Return the error of the model on one black image, or None if it takes the image."""
    like = next(net.parameters())
    try:
        run_once(net, torch.zeros(1, in_chans, *img_size, dtype=like.dtype, device=like.device))
    except Exception as error:
        return error
    return None


@torch.no_grad()
def run_once(net: nn.Module, images: Tensor | dict[str, Any]) -> None:
    """Run a model in evaluation mode; each of its modules keeps its own mode."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        # Call `forward` itself: `net(...)` would start the compilation of a model whose method `compile` was called.
        net.forward(images)
    finally:
        for module, mode in modes:
            module.training = mode
