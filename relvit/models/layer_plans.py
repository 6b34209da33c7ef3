"""Collect position, backend, the reason for the backend and stored memory of each attention layer (`explain`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from relvit.layers.mixer import LayerPlan, Mixer
from relvit.layers.patch_embed import check_divisible
from relvit.ops import Grid
from relvit.ops.checks import check_model, int_pair
from relvit.utils.messages import check_choice, part_of

# The rules by which a backend is chosen differ between these kinds of devices.
DEVICES = ("cpu", "cuda")


@torch.no_grad()
def explain(
    model: nn.Module,
    img_size: int | Sequence[int] | None = None,
    device: str | None = None,
    training: bool = True,
) -> list[LayerPlan]:
    """Describe how each attention layer computes: position, terms, backend with its reason, width, stored tensors.

    The function needs no images: it computes position tables, but no attention. Each layer's `plan` asks
    `relvit.ops.choose`. The plans are for all patches of an image at once: where fewer tokens attend, because the model
    drops patches in training, or computes in bands, another backend may run.

    Examples:
        >>> plan = explain(timm.create_model("relvit_tiny", img_size=64, depth=2))[0]
        >>> plan.layer, plan.position, plan.terms, plan.backend
        ('blocks.0.attn', 'RelativePosition2d', 'kv', 'lean')

    Args:
        model: a model of relvit, or of timm after `relvit.retrofit`.
        img_size: size of the images, one number or (height, width) in pixels; None: the model's own size.
        device: 'cpu' or 'cuda', the device for which a backend is chosen; this machine need not have such a device.
            'cuda' stands for GPUs of compute capability 8.0 or newer. None: the device of the parameters.
        training: whether the backend also has to compute gradients.

    Returns:
        A plan for each layer, in the order of the model.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model does not take this size, or has no size of its own (NaFlexVit) and none is given; it has
            no layers of relvit or no `patch_embed`; or the device is unknown.
    """
    check_model(model)
    if device is not None:
        check_choice("device", device, DEVICES)
    embed = getattr(model, "patch_embed", None) or getattr(model, "embeds", None)
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, Mixer)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layers of relvit: take a relvit_* model, call relvit.retrofit(model) if it "
            "is one of timm's Vision Transformers, or make your own mixer a subclass of relvit.layers.Mixer"
        )
    if embed is None:
        parts = [name for name, part in model.named_modules() if hasattr(part, "patch_embed")]
        hint = f": explain {part_of(parts[0])}, which has one" if parts else ": take a model that has one"
        raise ValueError(f"{type(model).__name__} has no patch_embed, which gives the grid of an image{hint}")
    size = getattr(embed, "img_size", None) if img_size is None else int_pair("img_size", img_size, 1)
    if size is None:
        raise ValueError(f"{type(model).__name__} has no image size of its own: give img_size, such as 224")
    if not embed.dynamic_img_pad:
        check_divisible(size, embed.patch_size, getattr(embed, "cropped_size", None))
    grid = Grid(*embed.dynamic_feat_size(size), model.num_prefix_tokens)
    return [layer.plan(name, grid, training, device) for name, layer in found.items()]
