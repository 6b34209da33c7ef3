"""Launch of the Triton kernels: block sizes, arguments, and the autograd function around them."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.backends.triton.backward import backward_keys, backward_queries
from relvit.ops.backends.triton.forward import forward

LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """Sizes of a kernel's tiles: queries, keys, warps, and stages of the pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, whether heads are wider than 64, and whether the GPU is a Hopper (sm_90), whose matrix units read shared
# memory and leave more registers. The largest tiles that `tools/gpu/kernels.py` compiles without spilled registers.
BLOCKS = {
    ("forward", False, False): Blocks(128, 32, 8, 2),
    ("forward", True, False): Blocks(128, 16, 8, 2),
    ("forward", False, True): Blocks(128, 64, 8, 3),
    ("forward", True, True): Blocks(128, 64, 8, 2),
    ("backward_queries", False, False): Blocks(64, 16, 4, 2),
    ("backward_queries", True, False): Blocks(32, 32, 4, 2),
    ("backward_queries", False, True): Blocks(128, 64, 8, 2),
    ("backward_queries", True, True): Blocks(128, 32, 8, 2),
    ("backward_keys", False, False): Blocks(16, 64, 4, 2),
    ("backward_keys", True, False): Blocks(32, 32, 4, 2),
    ("backward_keys", False, True): Blocks(64, 64, 4, 2),
    ("backward_keys", True, True): Blocks(64, 64, 8, 2),
}
# Not on matrix units, which would round to ten bits; heads wider than 64 spill registers.
BLOCKS_OF_FLOAT32 = Blocks(16, 32, 4, 1)


def tile_shape(keys: int, height: int, width: int) -> tuple[int, int]:
    """Divide a tile of keys into rows and columns of the grid such that the fewest tiles cover it."""
    # Of equals the first: few columns, which stay in registers, but as many as two threads of a matrix unit hold.
    columns = [size for size in (16, 8, 32, 64, 4, 2, 1) if size <= keys]
    cols = min(columns, key=lambda size: -(-height // (keys // size)) * -(-width // size))
    return keys // cols, cols


def constants(
    kernel: Any,
    dtype: torch.dtype,
    dims: tuple[int, int],
    size: tuple[int, int],
    flags: tuple[bool, bool, bool],
    hopper: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the constants of a kernel, and the options of its compilation.

    Args:
        kernel: `forward`, `backward_queries` or `backward_keys`.
        dtype: of queries, keys and values.
        dims: the head dimension and that of values.
        size: of the key grid.
        flags: whether there are terms in the logits, value terms, and padding.
        hopper: whether the GPU is an sm_90.
    """
    blocks = BLOCKS[kernel.__name__, max(dims) > 64, hopper] if dtype != torch.float32 else BLOCKS_OF_FLOAT32
    # The fewest keys that a matrix instruction takes are 16.
    keys = min(blocks.keys, max(16, triton.next_power_of_2(size[0] * size[1])))
    rows, cols = tile_shape(keys, *size)
    padded = (max(16, triton.next_power_of_2(dim)) for dim in dims)
    named = dict(zip(("DIM", "VALUE_DIM", "BLOCK_DIM", "BLOCK_VALUE"), (*dims, *padded), strict=True))
    precision = "ieee" if isinstance(kernel, triton.JITFunction) else "interpreted"
    named |= {"BLOCK_M": blocks.queries, "ROWS": rows, "COLS": cols, "STRIPS": size[1] > cols, "PRECISION": precision}
    named |= dict(zip(("KEY_TERM", "VALUE_TERM", "PADDED"), flags, strict=True))
    return named, {"num_warps": blocks.warps, "num_stages": blocks.stages}


class Attention(torch.autograd.Function):
    """The kernels, forward and backward.

    `apply(query, key, value, logits, valid, (prefix, height, width), scale, value_term)` returns the attention
    (B, heads, Nq, value_dim) and its marginals per row and column, (B, heads, Nq, H + W) float32 or None. Logits are
    (B, heads, Nq, H + W) or None, valid is (1 or B, Nk) or None.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        query, key, value, logits, valid, grid, scale, value_term = arguments
        query, key, value, logits = map(_with_unit_stride, (query, key, value, logits))
        if valid is not None:
            valid = valid.to(torch.uint8).expand(query.shape[0], -1)
        # Half precision is left for the sum with the value term, and rounded to once.
        out = _new(query, value.shape[-1], torch.float32 if value_term else query.dtype)
        marginals = _new(query, grid[1] + grid[2], torch.float32) if value_term else None
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        contents = (query, key, value, logits, valid)
        launch(forward, contents, (out, marginals), (lse,), (), grid, scale)
        ctx.grid, ctx.scale = grid, scale
        ctx.save_for_backward(*contents, out, marginals, lse)
        return out, marginals

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, grad_marginals: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Marked as differentiable once, this function would be left out of second derivatives without an error.
            raise RuntimeError("backend 'triton' has no second derivatives (create_graph=True): use backend='gathered'")
        *contents, out, marginals, lse = ctx.saved_tensors
        query, key, value, logits, valid = contents
        prefix, height, width = ctx.grid
        grad = _with_unit_stride(grad.to(query.dtype))
        means = (grad.float() * out).sum(-1)
        if marginals is None:
            grad_marginals = None
        else:
            grad_marginals = _with_unit_stride(grad_marginals)
            means += (grad_marginals * marginals).sum(-1)
        vectors = (lse, means.contiguous())
        grad_query, grad_key, grad_value = (_new(tensor, tensor.shape[-1]) for tensor in (query, key, value))
        grad_logits = None if logits is None else _new(query, height + width, torch.float32)
        grads = (grad, grad_marginals)
        launch(backward_queries, contents, grads, vectors, (grad_query, grad_logits), ctx.grid, ctx.scale)
        launch(backward_keys, contents, grads, vectors, (grad_key, grad_value), ctx.grid, ctx.scale)
        if prefix:
            # Prefix keys are one column of a tile without terms.
            alone, on_prefix = (query, key, value, None, valid), (0, prefix, 1)
            launch(backward_keys, alone, (grad, None), vectors, (grad_key, grad_value), on_prefix, ctx.scale)
        if grad_logits is not None:
            grad_logits = grad_logits.to(logits.dtype)
        return grad_query, grad_key, grad_value, grad_logits, None, None, None, None


def launch(
    kernel: Any,
    contents: tuple[Tensor | None, ...],
    results: tuple[Tensor, Tensor | None],
    vectors: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    grid: tuple[int, int, int],
    scale: float,
) -> None:
    """Run a kernel on all samples and heads.

    Args:
        kernel: as for `constants`.
        contents: query, key, value, logits, valid.
        results: the attention and its marginals, or in backward the gradients of both.
        vectors: a number per query each.
        grads: what a backward kernel writes.
        grid: prefix, height, width of the keys.
        scale: of the logits.
    """
    query, key, value, logits, valid = contents
    batch, heads, length, _ = query.shape
    flags = (logits is not None, results[1] is not None, valid is not None)
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    named, options = constants(kernel, query.dtype, (query.shape[-1], value.shape[-1]), grid[1:], flags, hopper)
    if kernel is backward_keys:
        programs = triton.cdiv(grid[1], named["ROWS"]) * triton.cdiv(grid[2], named["COLS"])
    else:
        programs = triton.cdiv(length, named["BLOCK_M"])
    if not batch * heads * programs:
        return
    tensors = (*contents, *results, *vectors, *grads)
    strides = [_strides(tensor) for tensor in (query, key, value, logits, *results, *grads)]
    strides.insert(4, (0 if valid is None else valid.stride(0),))
    # An absent tensor is never read.
    pointers = (query if tensor is None else tensor for tensor in tensors)
    sizes = (heads, length, *grid, scale * LOG2_E)
    kernel[(batch * heads * programs,)](*pointers, *chain(*strides), *sizes, **named, **options)


def _with_unit_stride(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor unless its last axis is contiguous in memory."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]


def _new(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """(B, heads, N, width) with tokens before heads in memory, as projections have it."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)
