"""Checks of arguments, and of double backward, that all operations share; each error names what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from relvit.utils.messages import check_choice


def check_backend(name: str, backends: Sequence[str]) -> None:
    """Raise unless `name` is 'auto' or one of `backends`."""
    check_choice("backend", name, ("auto", *backends))


def check_backward(backend: str, grad: Tensor) -> None:
    """Raise RuntimeError for second derivatives or for gradients of several results, in a backend's own backward."""
    if torch.is_grad_enabled():
        # PyTorch's `once_differentiable` would raise only if `grad` itself requires a gradient; otherwise second
        # derivatives would leave out the backend's function without an error.
        raise RuntimeError(f"backend {backend!r} has no second derivatives (create_graph=True): use backend='gathered'")
    if torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad):
        raise RuntimeError(
            f"backend {backend!r} has no gradients of several results at once (is_grads_batched=True, vectorize=True, "
            "vmap of torch.autograd.grad): use backend='gathered'"
        )


def check_kind(name: str, given: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless `given` is an instance of `kinds`, which the message calls `expected`."""
    if not isinstance(given, kinds):
        raise TypeError(f"{name} must be {expected}, got {type(given).__name__}")


def check_model(model: Any) -> None:
    """Raise TypeError unless `model` is a module; a name, a class and the Predictor of `relvit.load` get a hint."""
    if isinstance(model, nn.Module):
        return
    given, hint = type(model).__name__, ""
    if isinstance(model, str | type):
        given = repr(model) if isinstance(model, str) else f"the class {model.__name__}"
        hint = "; create the model first, with timm.create_model(...)"
    elif isinstance(getattr(model, "model", None), nn.Module):
        hint = "; give its attribute model"
    raise TypeError(f"model must be a module, got {given}{hint}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int | str, ...]) -> None:
    """Raise unless a floating tensor has the sizes in `expected`, in which a string allows any size."""
    check_kind(name, tensor, Tensor, "a tensor")
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({', '.join(map(str, expected))})")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected a floating-point dtype such as torch.float32")


def has_shape(tensor: Tensor, *shapes: tuple[int, ...]) -> bool:
    """Return whether a tensor has one of several shapes.

    Do not compare the shapes as tuples first: Python compares the numbers in two tuples before the tuples' lengths. So
    in a graph for all batch sizes B, Python would compare B of (B, patches) with `patches` of (patches,), and the graph
    would refuse batches of size `patches`.
    """
    return any(tensor.dim() == len(shape) and tuple(tensor.shape) == shape for shape in shapes)


def check_heads(dim: int, num_heads: int) -> None:
    """Raise unless the width of the tokens divides into this number of heads."""
    if not isinstance(num_heads, Integral) or num_heads < 1 or dim % num_heads:
        raise ValueError(f"num_heads must divide dim {dim}, got {num_heads}")


def int_pair(name: str, given: int | Sequence[int], least: int | None) -> tuple[int, int]:
    """Return an integer of Python or NumPy for both axes, or one per axis, as (rows, columns).

    Raises:
        TypeError: `given`, which messages call `name`, holds something that is not an integer.
        ValueError: there are not one or two integers, or one is below `least` (None: there is no limit).
    """
    pair = tuple(given) if isinstance(given, Sequence) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an int or (rows, columns), got {given!r}")
    for number in pair:
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise TypeError(f"{name} must hold integers, got {given!r}")
        if least is not None and number < least:
            raise ValueError(f"{name} must be at least {least}, got {given!r}")
    return int(pair[0]), int(pair[1])


def integer(name: str, given: int, least: int) -> int:
    """Return an integer of Python or NumPy; raise TypeError for anything else, and ValueError below `least`."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"{name} must be an integer, got {given!r}")
    if given < least:
        raise ValueError(f"{name} must be at least {least}, got {given}")
    # Do not call `int` on a symbolic integer of a graph, which would become a constant.
    return given if isinstance(given, int) else int(given)
