"""Run a model up to its pooled features, or once without changing its modes, to try an image size."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn


def pooled_features(net: nn.Module, images: Tensor | dict[str, Any]) -> Tensor:
    """Compute the pooled features before the classifier, (B, num_features).

    Examples:
        >>> model = timm.create_model("relvit_tiny", img_size=64, depth=1)
        >>> pooled_features(model, torch.randn(2, 3, 64, 96)).shape
        torch.Size([2, 192])

    Args:
        net: a model of timm or relvit.
        images: (B, C, H, W), or the patches of images of any shapes, see `relvit.models.sizes.native.embed_native`.
    """
    if isinstance(net, NaFlexVit) and isinstance(images, dict):
        features = net.forward_features(*(images[name] for name in ("patches", "patch_coord", "patch_valid")))
        return net.forward_head(**features, pre_logits=True)
    return net.forward_head(net.forward_features(images), pre_logits=True)


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
