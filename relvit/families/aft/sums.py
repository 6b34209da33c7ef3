"""Sums and quotients of AFT averages without overflow: exp(key), dtypes of products, limits of biases, causal sums.

Both sums are stored as channels of one tensor, (B, N, heads head_dim + heads c). The channels of a token are head_dim
numerators for each head, then c denominators for each head, where c is head_dim, or 1 if a head's channels share a key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.tracing import is_eager

# A bias that is more than 70 below the largest bias counts as 70 below it. Why 70: in each channel the largest key is
# subtracted from all keys, so the largest exponential of a key is 1. In float32 exponentials below exp(-87) are lost:
# they become 0. Even if the largest exponential has the weight exp(-70), and a lost exponential has the weight 1, the
# lost product is at most exp(-17) times the kept product, which is less than a rounding error.
SPREAD = 70.0
# These types of devices multiply matrices much faster in half precision. On these devices `exponentials` returns
# bfloat16 for bfloat16 inputs, so that `products` multiplies bfloat16 matrices; on other devices it returns float32.
HALF_PRODUCTS = {"cuda"}


def bounded_exp(exponent: Tensor) -> Tensor:
    """Compute exp of an exponent of at most 0; exponents below -SPREAD count as -SPREAD."""
    return exponent.clamp_min(-SPREAD).exp()


def exponentials(key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
    """Compute exp(key - m) value and exp(key - m); m, the largest key of a sample and channel, prevents overflow.

    Args:
        key: (B, heads, N, head_dim) or (B, heads, N, 1).
        value: (B, heads, N, head_dim).
        valid: (1 or B, N), False for padding, whose exponentials are zero, whatever numbers the padding holds.

    Returns:
        (B, N, heads head_dim + heads c): exp(key - m) value of all heads, then exp(key - m) of all heads, with c the
        size of the last axis of `key`. The dtype is bfloat16 if the inputs are in bfloat16 on a GPU, because bfloat16
        has the range of float32; otherwise it is float32, or float64 for float64 keys.
    """
    dtype, precision = value.dtype, torch.promote_types(key.dtype, torch.float32)
    key, value = (part.to(precision).transpose(1, 2) for part in (key, value))
    if valid is not None:
        absent = ~valid[:, :, None, None]
        key, value = key.masked_fill(absent, -torch.inf), value.masked_fill(absent, 0.0)
    top = key.detach().amax(dim=1, keepdim=True)
    if valid is not None:
        top = top.masked_fill(torch.isneginf(top), 0.0)
    if is_eager():
        parts = _Exponentials.apply(key, value, top)
    else:
        weights = (key - top).exp()
        parts = torch.cat(((weights * value).flatten(2), weights.flatten(2)), dim=2)
    half = dtype == torch.bfloat16 and parts.device.type in HALF_PRODUCTS
    return parts.to(dtype) if half else parts


class _Exponentials(torch.autograd.Function):
    """Exponentials whose gradients take fewer passes over memory than autograd's own."""

    @staticmethod
    def forward(key: Tensor, value: Tensor, top: Tensor) -> Tensor:
        batch, count, heads, width = value.shape
        parts = value.new_empty(batch, count, heads * (width + key.shape[3]))
        numerator, denominator = split_heads(parts, heads, width)
        torch.mul(torch.sub(key, top, out=denominator).exp_(), value, out=numerator)
        return parts

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, parts = ctx.saved_tensors
        weights = split_heads(parts, *value.shape[2:])[1]
        of_numerator, of_denominator = split_heads(grad, *value.shape[2:])
        of_key = (of_numerator * value).sum_to_size(weights.shape).add_(of_denominator).mul_(weights)
        return of_key, of_numerator * weights, None


def split_heads(parts: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Split (B, N, heads width + heads c) into numerators (B, N, heads, width) and denominators (B, N, heads, c).

    c is 1 or `width`, see `exponentials`.
    """
    numerator, denominator = parts.split((heads * width, parts.shape[2] - heads * width), dim=2)
    return numerator.unflatten(2, (heads, width)), denominator.unflatten(2, (heads, -1))


def per_channel(per_head: Tensor, channels: int, width: int) -> Tensor:
    """Repeat numbers of each head, (heads, ...), for each of the head's channels, in the order of `exponentials`."""
    heads = per_head.shape[0]
    shared = channels // heads - width
    return torch.cat((per_head.repeat_interleave(width, 0), per_head.repeat_interleave(shared, 0)))


def products(weights: Tensor, parts: Tensor, width: int) -> Tensor:
    """Compute sum_j weights_ij parts_j.

    Args:
        weights: (1 or heads, N, N), shared by all heads or one matrix per head.
        parts: (B, N, channels), as `exponentials` returns them.
        width: head_dim.
    """
    if weights.shape[0] == 1:
        return weights @ parts
    split = split_heads(parts, weights.shape[0], width)
    # Put the numerators and denominators of each token and head side by side, so that one product for each head sums up
    # both: (heads, N, B, head_dim + denominators).
    together = torch.cat(split, dim=3).permute(2, 1, 0, 3)
    sums = torch.bmm(weights, together.flatten(2)).view(together.shape).permute(2, 1, 0, 3)
    return torch.cat((sums[..., :width].flatten(2), sums[..., width:].flatten(2)), dim=2)


def gated_average(query: Tensor, sums: Tensor, valid: Tensor | None) -> Tensor:
    """Compute sigmoid(query) * numerator / denominator, in float32 at least.

    Args:
        query: (B, heads, N, head_dim).
        sums: (B, N or 1, heads head_dim + heads c): numerators, then c denominators for each head; c is head_dim or 1.
        valid: where tokens are not padding; None: there is no padding. With padding a denominator may be zero, and the
            average is then zero.

    Returns:
        (B, heads, N, head_dim), dtype of the query.
    """
    query, padded = query.transpose(1, 2), valid is not None
    if is_eager() and sums.shape[1] == query.shape[1]:
        return _GatedAverage.apply(query, sums, padded).transpose(1, 2)
    return _gated_average(query, sums, padded).transpose(1, 2)


def _gated_average(query: Tensor, sums: Tensor, padded: bool) -> Tensor:
    numerator, denominator = split_heads(sums.to(torch.promote_types(sums.dtype, torch.float32)), *query.shape[2:])
    if padded:
        denominator = torch.where(denominator == 0, 1.0, denominator)
    return (query.to(numerator.dtype).sigmoid() * (numerator / denominator)).to(query.dtype)


class _GatedAverage(torch.autograd.Function):
    """`_gated_average`, which backward computes once more: autograd by itself would keep gates and averages."""

    @staticmethod
    def forward(query: Tensor, sums: Tensor, padded: bool) -> Tensor:
        return _gated_average(query, sums, padded)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        *tensors, ctx.padded = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        inputs = [
            part if create_graph and part.requires_grad else part.detach().requires_grad_()
            for part in ctx.saved_tensors
        ]
        with torch.enable_grad():
            mixed = _gated_average(*inputs, ctx.padded)
        return *torch.autograd.grad(mixed, inputs, grad, create_graph=create_graph), None


def running_average(key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
    """Compute sum over j <= i of softmax_j(key_j) value_j for each i and channel, in log2 N steps over all tokens.

    Each step doubles the number of tokens in each token's sums. The sums are divided by the exponential of the largest
    key among these tokens, so they cannot overflow, and only numbers smaller than the rounding error are lost.

    Args: see `exponentials`.

    Returns:
        (B, heads, N, head_dim), in float32 at least.
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    top, numerator = key.to(precision), value.to(precision)
    denominator = torch.ones_like(top)
    if valid is not None:
        absent = ~valid[:, None, :, None]
        top = top.masked_fill(absent, torch.finfo(precision).min)
        numerator, denominator = numerator.masked_fill(absent, 0.0), denominator.masked_fill(absent, 0.0)
    step = 1
    while step < key.shape[2]:
        first, before = top[:, :, :step], top[:, :, :-step]
        highest = torch.cat((first, torch.maximum(top[:, :, step:], before)), dim=2)
        here, there = (top - highest).exp(), (before - highest[:, :, step:]).exp()
        numerator, denominator = (
            torch.cat((sums[:, :, :step], (here * sums)[:, :, step:] + there * sums[:, :, :-step]), dim=2)
            for sums in (numerator, denominator)
        )
        top, step = highest, 2 * step
    return numerator / torch.where(denominator == 0, 1.0, denominator)
