"""What the averages of attention-free transformers end with: sigmoid(query) times numerator over denominator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.aft.exponentials import Sums
from relvit.ops.tracing import is_compiling, is_functorch


def gated(query: Tensor, mixed: Tensor) -> Tensor:
    """sigmoid(query) * mixed, in the query's dtype; computed in that of `mixed`."""
    return (query.to(mixed.dtype).sigmoid() * mixed).to(query.dtype)


def gated_average(query: Tensor, sums: Sums, valid: Tensor | None) -> Tensor:
    """sigmoid(query) * numerator / denominator, (B, heads, N, head_dim) in the query's dtype.

    Computed in float32 at least; zero where nothing is valid.
    """
    numerator, denominator = sums
    if valid is not None:
        denominator = torch.where(denominator == 0, 1.0, denominator)
    if is_compiling() or is_functorch() or numerator.shape != query.shape:
        return _gated_average(query, numerator, denominator)
    return _GatedAverage.apply(query, numerator, denominator)


def _gated_average(query: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    precision = torch.promote_types(numerator.dtype, torch.float32)
    return gated(query, numerator.to(precision) / denominator.to(precision))


class _GatedAverage(torch.autograd.Function):
    """Gates and averages are made again for the gradients: autograd by itself would keep both."""

    @staticmethod
    def forward(query: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
        return _gated_average(query, numerator, denominator)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # these gradients are to be differentiated
            return torch.autograd.grad(_gated_average(*inputs), inputs, grad, create_graph=True)
        precision = torch.promote_types(inputs[1].dtype, torch.float32)
        query, numerator, denominator, grad = (part.to(precision) for part in (*inputs, grad))
        gate, mixed = query.sigmoid(), numerator / denominator
        of_query = torch.ops.aten.sigmoid_backward(grad * mixed, gate)
        of_numerator = gate.mul_(grad).div_(denominator)
        of_denominator = mixed.mul_(of_numerator).neg_().sum_to_size(denominator.shape)
        found = of_query, of_numerator, of_denominator
        return tuple(one.to(given.dtype) for one, given in zip(found, inputs, strict=True))
