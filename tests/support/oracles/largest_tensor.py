"""Measure the largest tensor of a computation on the meta device, where tensors take no memory."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def meta(*shape):
    """Make a tensor on the meta device that requires a gradient."""
    return torch.empty(shape, device="meta", requires_grad=True)


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor in memory."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        # A broadcast tensor takes less memory than its shape says, so measure the storage.
        sizes = [
            tensor.untyped_storage().nbytes() // tensor.itemsize
            for tensor in tree_leaves(out)
            if isinstance(tensor, Tensor)
        ]
        self.numbers = max(self.numbers, *sizes, 0)
        return out
