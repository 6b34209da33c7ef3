"""Compile a network in place by `torch.compile`, for the image sizes of a training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from relvit.app.utils.exceptions import attribute_of


def compile_in_place(net: nn.Module, backend: bool | str, data: Any) -> None:
    """Compile a network in place, so that its state dict keeps its names; skip a network that is compiled already.

    See `compile` of `relvit.app.training.ImageClassifier` for `backend`. If the data module has `train_sizes`, PyTorch
    compiles a graph for each size, instead of one graph for all sizes.
    """
    if not backend or net._compiled_call_impl is not None:
        return
    sizes = attribute_of(data, "train_sizes")
    if sizes:
        # Each size needs a graph in training, and evaluation needs further graphs, for example for its smaller last
        # batch. Beyond its limit of graphs, PyTorch would run the network without compiling it.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 2 * len(sizes) + 4)
    net.compile(backend="inductor" if backend is True else backend, dynamic=False if sizes else None)
