"""Concatenation and lookup by index, with gradients, in forms that Inductor fuses with the next operation.

In compiled graphs a sum of zero-padded parts replaces `cat`, and for up to `MOST_COMPARED` entries a sum over
`index == entry` replaces `scatter_add`. Inductor fuses these forms with the operation that reads the result, so the
lookup index and the one-hot vectors of rows and columns are never stored. Outside of compiled graphs, and in exported
graphs, the functions here call `cat`, `scatter_add` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from relvit.ops.tracing import is_eager, is_fusing

# In a compiled graph, a sum over `index == entry` replaces `scatter_add` for at most this number of table entries. The
# sum reads all numbers once per entry, so with more entries `scatter_add` is faster.
MOST_COMPARED = 64


def padded_cat(parts: Sequence[Tensor], dim: int, before: int = 0, after: int = 0) -> Tensor:
    """Concatenate tensors of equal dtype along a negative `dim`, with zeros before and after."""
    if is_fusing():
        if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
            # PyTorch's compiler refuses one tensor as two arguments of an autograd function, such as one table for rows
            # and columns, but accepts two views of it, so pass views.
            return _PaddedCat.apply(dim, before, after, *(part.view_as(part) for part in parts))
        return _sum_of_padded(dim, before, after, parts)
    joined = torch.cat(tuple(parts), dim=dim)
    # `F.pad` would copy the tensor even if it adds no zeros, so call it only where there are zeros to add.
    return F.pad(joined, (*(0, 0) * (-dim - 1), before, after)) if before or after else joined


def computed_together(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors (B, heads, N, width) unchanged; in a compiled graph, views of one tensor that one kernel computes.

    All sizes except N must be equal; if N differs, the tensors stay separate.
    """
    tokens = parts[0].shape[2]
    if not is_fusing() or not all(statically_known_true(part.shape[2] == tokens) for part in parts):
        return parts
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Together.apply(*parts)
    return _together(parts)


def split_in_two(tensor: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """Return the first `first` channels of a tensor, and the `second` channels after them; leave out all others."""
    if is_fusing():
        # The gradient of `split` would be a `cat`, which takes longer than the gradients of two slices.
        return tensor[..., :first], tensor[..., first : first + second]
    return tensor[..., : first + second].split((first, second), dim=-1)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """Compute `values.gather(-1, index)`; backward keeps only the shape of `values`."""
    if is_fusing() or (torch.is_grad_enabled() and is_eager()):
        return _Gather.apply(values, index)
    return values.gather(-1, index)


def scatter_sum(values: Tensor, index: Tensor, entries: int) -> Tensor:
    """Add up the values with the same index along the last axis: (..., entries)."""
    if is_fusing():
        return _ScatterSum.apply(values, index, entries)
    return _scatter_sum(values, index, entries)


def _scatter_sum(values: Tensor, index: Tensor, entries: int) -> Tensor:
    if is_fusing() and statically_known_true(entries <= MOST_COMPARED):
        numbers = torch.arange(entries, device=values.device)[:, None]
        return torch.where(index[..., None, :] == numbers, values[..., None, :], 0).sum(dim=-1)
    zeros = values.new_zeros(*values.shape[:-1], entries)
    # PyTorch 2.11 compiles wrong gradients for an autograd function that changes a tensor in place, as `scatter_add_`
    # does, so add out of place in compiled graphs.
    return zeros.scatter_add(-1, index, values) if is_fusing() else zeros.scatter_add_(-1, index, values)


def _sum_of_padded(dim: int, before: int, after: int, parts: Sequence[Tensor]) -> Tensor:
    rest, after, joined = (0, 0) * (-dim - 1), after + sum(part.shape[dim] for part in parts), None
    for part in parts:
        after -= part.shape[dim]
        padded = F.pad(part, (*rest, before, after))
        joined = padded if joined is None else joined + padded
        before += part.shape[dim]
    return joined


def _together(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    batch, heads, tokens, width = parts[0].shape
    joined = _sum_of_padded(-2, 0, 0, [part.transpose(1, 2) for part in parts]).contiguous()
    # If the parts were slices of `joined`, Inductor would compute each part in its own kernel. Before a call of
    # `as_strided`, Inductor computes the whole tensor `joined` in one kernel.
    row = len(parts) * heads * width
    size, stride = (batch, heads, tokens, width), (tokens * row, width, row, 1)
    return tuple(joined.as_strided(size, stride, number * heads * width) for number in range(len(parts)))


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *parts: Tensor) -> tuple[Tensor, ...]:
        return _together(parts)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, ...]:
        # Without this class autograd would pad the gradient of each part with zeros, and add up the padded gradients.
        return grads


class _PaddedCat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, dim: int, before: int, after: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.before, ctx.sizes = dim, before, [part.shape[dim] for part in parts]
        return _sum_of_padded(dim, before, after, parts)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd's gradient of `pad` would copy each part; `narrow` returns a view.
        start, grads = ctx.before, []
        for size in ctx.sizes:
            grads.append(grad.narrow(ctx.dim, start, size))
            start += size
        return None, None, None, *grads


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, index: Tensor) -> Tensor:
        ctx.entries = values.shape[-1]
        ctx.save_for_backward(index)
        return values.gather(-1, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # Add up in single precision: in half precision a GPU would round after each addition.
        sums = _scatter_sum(grad.to(torch.promote_types(grad.dtype, torch.float32)), index, ctx.entries)
        return sums.to(grad.dtype), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, index: Tensor, entries: int) -> Tensor:
        ctx.save_for_backward(index)
        return _scatter_sum(values, index, entries)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.gather(-1, index), None, None
