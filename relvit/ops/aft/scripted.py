"""Register AFT for TorchScript and symbolic tracing as one operator of PyTorch; see `relvit.ops.backends.scripted`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relvit.ops.aft.api import aft_conv, aft_full, aft_simple
from relvit.ops.backends.scripted import register_operator
from relvit.ops.grid import Grid

OPERATIONS: dict[str, Callable[..., Tensor]] = {"full": aft_full, "conv": aft_conv}


def gated_mix(
    operation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    grid: Grid,
    is_causal: bool,
    backend: str,
) -> Tensor:
    """Call `aft_simple`, or `aft_full` or `aft_conv` with a bias; a leaf that TorchScript takes as one operator.

    Args:
        operation: 'simple', 'full' or 'conv'.
        query, key, value, grid, is_causal, backend: see `relvit.ops.aft_full`.
        bias: bias or weight of the operation; None for 'simple'.
    """
    if torch.jit.is_scripting():
        return torch.ops.relvit.gated_mix(
            operation, query, key, value, bias, grid.height, grid.width, grid.prefix, grid.coords, grid.valid,
            is_causal, backend,
        )  # fmt: skip
    if operation == "simple":
        return aft_simple(query, key, value, grid, is_causal=is_causal, backend=backend)
    return OPERATIONS[operation](query, key, value, bias, grid, is_causal=is_causal, backend=backend)


def _run(*arguments: object) -> Tensor:
    *first, height, width, prefix, coords, valid, is_causal, backend = arguments
    return gated_mix(*first, Grid(height, width, prefix, coords, valid), is_causal, backend)


register_operator(
    "gated_mix(str operation, Tensor query, Tensor key, Tensor value, Tensor? bias, int height, int width, int prefix, "
    "Tensor? coords, Tensor? valid, bool is_causal, str backend) -> Tensor",
    _run,
)
