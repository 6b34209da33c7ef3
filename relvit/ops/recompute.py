"""Less memory in training: recompute in backward instead of keeping tensors; refuse tensors modified in place.

`recomputed` runs a whole function once more in backward (PyTorch's checkpoint). `recompute_saved` recomputes only the
operands of an operation: `fused` uses it for the operands of stock attention, because `recomputed` would compute the
attention itself twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from relvit.ops.tracing import is_compiling, is_eager, may_recompute


class Versions:
    """Versions of tensors; `check` raises if one of these tensors was modified in place after this object was created.

    Autograd only checks tensors that autograd itself saved, and not tensors that a saved-tensor hook or a recomputation
    keeps.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Inference tensors have no version, and PyTorch forbids to modify them in place outside of inference mode, so
        # they need no check.
        self._seen = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def check(self) -> None:
        """Raise RuntimeError for a tensor that was modified in place."""
        for tensor, version in self._seen:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that is needed for gradients was modified in place "
                    "since an operation of relvit had read it: clone it before, or compute the gradients first"
                )


def recomputed(function: Callable[..., Tensor], *args: object, preserve_rng_state: bool = False) -> Tensor:
    """Compute `function(*args)`; backward computes it once more instead of keeping its intermediate tensors.

    Source: Chen et al. 2016 (arXiv 1604.06174). Without gradients, in exported graphs and inside `torch.func`, which
    cannot recompute, `recomputed` just calls the function.

    Args:
        function: the function; give it all tensors that it reads as `args`, because backward checks no others for
            changes.
        args: tensors, also within tuples, or anything else.
        preserve_rng_state: whether `function` uses random numbers.

    Raises:
        RuntimeError: in backward, one of the tensors has been modified in place.
    """
    if not torch.is_grad_enabled() or not may_recompute():
        return function(*args)
    options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if is_compiling():
        return checkpoint(function, *args, **options)
    # PyTorch's checkpoint saves its tensor arguments as autograd saves any tensor: autograd notices if they are
    # modified in place, and an outer checkpoint need not keep them. Neither holds for tensors within tuples, so flatten
    # `args`.
    leaves, structure = tree_flatten(args)
    return checkpoint(lambda *leaves: function(*tree_unflatten(leaves, structure)), *leaves, **options)


@contextmanager
def recompute_saved(
    tensors: list[Tensor], function: Callable[..., list[Tensor]], inputs: list[Tensor | None]
) -> Iterator[None]:
    """Context in which operations do not save `tensors` for backward, in which `function` computes them again.

    Autograd's saved-tensor hooks replace `tensors`, so gradients of any order work, and operations call the same
    kernels as without the context. In graphs and inside `torch.func`, which forbid such hooks, the context does
    nothing. The context also does nothing where hooks of the user, or of an outer checkpoint, decide what to do with
    saved tensors.

    Args:
        tensors: operands of operations in the context; backward recomputes these tensors instead of keeping them.
        function: the function that computes all of `tensors` from `inputs`.
        inputs: the arguments of `function`: None, or tensors that stay in memory anyway.

    Raises:
        RuntimeError: in backward, one of `inputs`, or another saved tensor, has been modified in place.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    if not torch.is_grad_enabled() or not is_eager() or hooks(False) is not None:
        yield
        return
    recomputation = _Recomputation(function, inputs)
    # `by_memory` keeps `tensors` alive within the context, so that no other tensor can get the memory of one of them.
    by_memory = {_memory(tensor): (number, tensor) for number, tensor in enumerate(tensors)}

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        number, tensor = by_memory.get(_memory(saved), (0, None))
        if tensor is not None and tensor.shape == saved.shape:
            return partial(recomputation.take, number)
        # If `saved` is an output, its node in the graph keeps the function that is returned here, so this function must
        # not keep the node. Python's garbage collector would not find the cycle, and a graph without backward would
        # never be freed.
        saved = saved.detach()
        return partial(_unchanged, saved, Versions([saved]))

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack()):
            yield
    finally:
        # Saved tensors keep `pack` alive, and `pack` would keep `tensors` alive through `by_memory`.
        by_memory.clear()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Say which memory a tensor views; do not ask for its address, because fake tensors have none."""
    # Expanded views of one tensor, such as one image's keys for a whole batch, differ only in strides.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()


def _unchanged(saved: Tensor, versions: Versions) -> Tensor:
    versions.check()
    return saved


class _Recomputation:
    """Results of one call, each handed out once: one backward asks for all of them in turn."""

    def __init__(self, function: Callable[..., list[Tensor]], inputs: list[Tensor | None]) -> None:
        self._function = function
        self._inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
        self._versions = Versions(tensor for tensor in self._inputs if tensor is not None)
        self._waiting: dict[int, Tensor] = {}

    def take(self, number: int) -> Tensor:
        self._versions.check()
        if number not in self._waiting:
            with torch.no_grad():
                self._waiting = dict(enumerate(self._function(*self._inputs)))
        return self._waiting.pop(number)
