"""Whether a graph is being made, or `torch.func` or forward-mode differentiation is at work."""

import torch
from torch.autograd import forward_ad


def in_graph() -> bool:
    """While a graph is compiled or exported by PyTorch, or traced by `torch.jit.trace`."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def in_transform() -> bool:
    """Inside of a transform of `torch.func` (vmap, jvp, grad ...) or a level of `torch.autograd.forward_ad`.

    Their tensors have no memory of their own, and they ask every operation for rules of its own: saved-tensor hooks
    and hand-written backwards have none.
    """
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
