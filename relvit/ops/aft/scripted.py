"""Attention-free operations as operators of PyTorch, for TorchScript; see `relvit.ops.backends.scripted`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from relvit.ops.aft.operations import aft_conv, aft_full, aft_local, aft_simple
from relvit.ops.backends.scripted import register_operator
from relvit.ops.grid import Grid

CONTENTS = "Tensor query, Tensor key, Tensor value"
LAYOUT = "int height, int width, int prefix, Tensor? coords, Tensor? valid, bool is_causal, str backend"


def _on_a_grid(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation with the grid taken apart: its parts, `is_causal` and `backend` come last."""

    def run(*arguments: object) -> Tensor:
        *first, height, width, prefix, coords, valid, is_causal, backend = arguments
        grid = Grid(height, width, prefix, coords, valid)
        return operation(*first, grid, is_causal=is_causal, backend=backend)

    return run


for name, operation, own in (
    ("aft_full", aft_full, "Tensor bias, "),
    ("aft_local", aft_local, "Tensor bias, int[2] window, "),
    ("aft_simple", aft_simple, ""),
    ("aft_conv", aft_conv, "Tensor weight, "),
):
    register_operator(f"{name}({CONTENTS}, {own}{LAYOUT}) -> Tensor", _on_a_grid(operation))
