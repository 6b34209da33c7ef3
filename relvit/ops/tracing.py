"""Queries about what PyTorch does around a call: compiling, exporting, tracing, torch.func, autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def is_compiling() -> bool:
    """Return True while PyTorch compiles, exports or traces a graph, which serves other values and sizes, too."""
    # `torch.jit.trace` counts as compiling, because it cannot record an autograd function with a custom backward.
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exporting() -> bool:
    """Return True while `torch.export` or `torch.jit.trace` makes a graph."""
    # Read the flag itself: `torch.compiler.is_exporting` is always True in PyTorch 2.11's compiled graphs.
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()


def is_fusing() -> bool:
    """Return True while `torch.compile` makes a graph, whose compiler may fuse operations, outside of `torch.func`."""
    return is_compiling() and not is_exporting() and not is_functorch()


def larger(one: int, other: int) -> int:
    """Return the larger of two sizes; no condition compares symbolic sizes, so that one graph serves all sizes."""
    if torch.jit.is_tracing():
        # `torch.jit.trace` gives sizes as tensors, but constant sizes as integers, so turn both into tensors.
        return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))
    # In `torch.export`, `max` of symbolic sizes would compare the sizes, so use `torch.sym_max` there. Dynamo turns
    # `max` of symbolic sizes into `torch.sym_max` itself, and PyTorch 2.11 cannot compile `torch.sym_max` of two
    # integers.
    return max(one, other) if torch.compiler.is_dynamo_compiling() else torch.sym_max(one, other)


def is_functorch() -> bool:
    """Return True inside a transform of `torch.func` (vmap, jvp, grad ...) or a level of `torch.autograd.forward_ad`.

    Inside such a transform or level, tensors have no memory of their own, and every operation needs a rule for each
    transform, which saved-tensor hooks and hand-written backwards do not have.
    """
    # PyTorch 2.11 has several functions that tell whether a transform is active, but its compiler treats only the
    # result of `_are_functorch_transforms_active` as a constant, so use this one.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return True outside of graphs and `torch.func`: only there may operations have a custom backward."""
    # Layers call `is_eager` in every forward, so the conditions of `is_compiling` and `is_functorch` are written out
    # here, which saves two calls.
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def knows_values() -> bool:
    """Return True if Python may read values and sizes of tensors; a graph also serves other values and sizes."""
    return not is_compiling()


def relies_on_strides() -> bool:
    """Return True while a graph is exported or traced, which relies on the strides of its example's tensors."""
    return is_exporting()


def may_recompute() -> bool:
    """Return True where a backward may compute something once more: `torch.export` and `torch.func` cannot."""
    return not is_exporting() and not is_functorch()


def may_remember() -> bool:
    """Return True where later calls may use the same tensors: not in graphs, in `torch.func` or for fake tensors.

    Inside a transform of `torch.func` even new constants belong to the transform, and are invalid after it. While a
    CUDA graph is captured, nothing is computed: tensors get their numbers by a replay, perhaps after other calls.
    """
    if not is_eager() or type(torch.empty(0)) is not Tensor:
        return False
    return not is_capturing()


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured, whose replays read the memory of all tensors that it reads now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def trains_in_graph() -> bool:
    """Return True while PyTorch compiles a graph with its backward, outside of `torch.func`."""
    return torch.is_grad_enabled() and is_fusing()


def is_watched() -> bool:
    """Return True where a profiler or a dispatch mode, such as `FlopCounterMode`, watches operations of this thread."""
    return torch.autograd._profiler_enabled() or is_in_torch_dispatch_mode()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Switch autocast off for a device; where autocast does not exist (the meta device), do nothing."""
    # The compiler of PyTorch 2.11 cannot call `is_autocast_available`, so ask only outside of compiled graphs.
    if not is_compiling() and not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
