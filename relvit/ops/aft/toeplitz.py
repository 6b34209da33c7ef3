"""Sums over all places of a raster with weights that depend on the offset, as products with Toeplitz matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from relvit.ops.tracing import is_compiling, is_functorch

# How many numbers of matrices are formed at a time: on processors what stays in a cache. Elsewhere, and in graphs, few
# and large operations are better.
MATRIX_NUMBERS = {"cpu": 2**18}
MOST_MATRIX_NUMBERS = 2**28


def toeplitz_sums(table: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """sum_j table[j - i] x_j over the places j of the rows that the table reaches.

    The matrix of these weights is Toeplitz by blocks. For one row of queries it can be laid out so that every query has
    the weights of all rows of keys in one line of memory, and another row of queries has an earlier piece of that line.
    So one row needs no matrix of its own, and a matrix for all rows is made of a few long pieces, for some heads at a
    time: backward forms it again.

    Args:
        table: (heads, 2 r + 1, 2 W - 1), weights by offset; rows that are further away than r do not count.
        x: (heads, H W, n), what is summed, places in raster order.
        height: H.
        width: W.

    Returns:
        (heads, H W, n).
    """
    # (heads, W, (2 r + 1) W): for a query's column, the weights of all offsets of rows and columns of keys.
    lines = table.unfold(2, width, 1).permute(0, 2, 1, 3).flip(1).flatten(2)
    if is_compiling() or is_functorch() or not torch.is_grad_enabled():
        return _product(lines, x, height, width)
    return _Product.apply(lines, x, height, width)


class _Product(torch.autograd.Function):
    """Autograd by itself would fill a gradient of all lines, and one of all of x, for every row."""

    @staticmethod
    def forward(lines: Tensor, x: Tensor, height: int, width: int) -> Tensor:
        return _product(lines, x, height, width)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
        lines, x, ctx.height, ctx.width = inputs
        ctx.save_for_backward(lines, x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        lines, x = ctx.saved_tensors
        height, width = ctx.height, ctx.width
        grad = grad.contiguous()
        grad_lines = grad_x = None
        if ctx.needs_input_grad[1]:
            # The transposed matrix has the weights of the opposite offsets.
            opposite = lines.unflatten(2, (-1, width)).flip(2).transpose(1, 3).flatten(2)
            grad_x = _product(opposite, grad, height, width)
        if ctx.needs_input_grad[0]:
            grad_lines = torch.zeros_like(lines)
            for heads, rows, low, high in _tiles(lines, height, width):
                ours = grad[heads, rows.start * width : rows.stop * width].unflatten(1, (-1, width))
                theirs = x[heads, low * width : high * width].transpose(1, 2)
                pairs = torch.bmm(ours.flatten(1, 2), theirs).unflatten(1, (-1, width))
                for number, row in enumerate(rows):
                    grad_lines[heads, :, _piece(lines, row, low, high, width)] += pairs[:, number]
        return grad_lines, grad_x, None, None


def _product(lines: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    out: list[list[Tensor]] = []
    for heads, rows, low, high in _tiles(lines, height, width):
        if rows.start == 0:
            out.append([])
        pieces = [lines[heads, :, _piece(lines, row, low, high, width)] for row in rows]
        out[-1].append(torch.bmm(_joined(pieces, 1), x[heads, low * width : high * width]))
    return _joined([_joined(parts, 1) for parts in out], 0)


def _tiles(lines: Tensor, height: int, width: int) -> Iterator[tuple[slice, range, int, int]]:
    """Which heads and which rows of queries are computed at once, and the first and last row of their keys."""
    reach = lines.shape[2] // width // 2
    if reach < height - 1:
        for row in range(height):
            yield slice(None), range(row, row + 1), max(0, row - reach), min(height, row + reach + 1)
        return
    device = "a graph" if is_compiling() else lines.device.type
    heads = max(1, MATRIX_NUMBERS.get(device, MOST_MATRIX_NUMBERS) // (height * width) ** 2)
    for first in range(0, lines.shape[0], heads):
        yield slice(first, first + heads), range(height), 0, height


def _piece(lines: Tensor, row: int, low: int, high: int, width: int) -> slice:
    """Where in the lines the weights of the keys in rows `low` to `high` are for queries in `row`."""
    reach = lines.shape[2] // width // 2
    return slice((low - row + reach) * width, (high - row + reach) * width)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
