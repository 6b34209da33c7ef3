"""How large tensors become, on the meta device, where none takes memory."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def meta(*shape):
    """A tensor without memory, whose gradient is wanted."""
    return torch.empty(shape, device="meta", requires_grad=True)


class Largest(TorchDispatchMode):
    """Records how many numbers the largest tensor in memory has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        # Broadcast tensors are not in memory.
        sizes = [
            tensor.untyped_storage().nbytes() // tensor.itemsize
            for tensor in tree_leaves(out)
            if isinstance(tensor, Tensor)
        ]
        self.numbers = max(self.numbers, *sizes, 0)
        return out
