"""Tensors that backward makes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relvit.ops.transforms import in_graph, in_transform


class Rebuilt:
    """Inside `with Rebuilt() as rebuilt:`, registered tensors are not kept for backward, but how to make them is.

    Autograd's saved-tensor hooks do the exchange, so gradients of any order, and every kernel, stay what they are.
    While a graph is compiled it does nothing: the compiler's partitioner makes that choice by itself. Nor does it in a
    traced one, of which hooks are no part, nor under `torch.func`, whose transforms forbid such hooks.
    """

    def __init__(self) -> None:
        self._active = torch.is_grad_enabled() and not in_graph() and not in_transform()
        # Registered tensors stay alive within the context, so that their addresses are theirs alone.
        self._registered: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack) if self._active else None

    def __enter__(self) -> Rebuilt:
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._registered.clear()
        if self._hooks is not None:
            self._hooks.__exit__(*exception)

    def all_of(self, tensors: list[Tensor], make: Callable[[], list[Tensor]], inputs: list[Tensor | None]) -> None:
        """Register tensors that `make` makes again from `inputs`, together, without gradients of its own."""
        if self._active:
            batch = _Batch(make, inputs)
            for position, tensor in enumerate(tensors):
                self._registered[tensor.data_ptr()] = (tensor, lambda position=position: batch.take(position))

    def shape_of(self, tensor: Tensor) -> None:
        """Register a tensor of whose values backward needs nothing but shape and dtype."""
        if self._active:
            shape = tensor.shape
            empty = tensor.new_zeros(())
            self._registered[tensor.data_ptr()] = (tensor, lambda: empty.expand(shape))

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        registered, make = self._registered.get(tensor.data_ptr(), (None, None))
        if registered is None or make is None or registered.numel() != tensor.numel():
            return tensor
        if registered.shape == tensor.shape:
            return make
        if registered.is_contiguous() and tensor.is_contiguous():
            shape = tensor.shape
            return lambda: make().reshape(shape)
        return tensor


class _Batch:
    """Results of one call, each handed out once: one backward asks for all of them, one after the other."""

    def __init__(self, make: Callable[[], list[Tensor]], inputs: list[Tensor | None]) -> None:
        self._make = make
        self._inputs = [tensor.detach() for tensor in inputs if tensor is not None]
        self._versions = [tensor._version for tensor in self._inputs]
        self._waiting: dict[int, Tensor] = {}

    def take(self, position: int) -> Tensor:
        if [tensor._version for tensor in self._inputs] != self._versions:
            raise RuntimeError("an input of relative_attention was modified in place before its gradient was computed")
        if position not in self._waiting:
            with torch.no_grad():
                self._waiting = dict(enumerate(self._make()))
        return self._waiting.pop(position)


def _unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()
