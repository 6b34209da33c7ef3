"""Attention-free transformers as the paper's equations read, number by number, in Python."""

import math

import torch
from torch import Tensor

from relvit.ops import Grid


def place(token: int, grid: Grid, sample: int) -> tuple[int, int] | None:
    """Row and column of a token, None for prefix tokens."""
    if token < grid.prefix:
        return None
    if grid.coords is None:
        return divmod(token - grid.prefix, grid.width)
    coords = grid.coords if grid.coords.dim() == 2 else grid.coords[sample]
    return tuple(coords[token - grid.prefix].tolist())


def is_valid(token: int, grid: Grid, sample: int) -> bool:
    if grid.valid is None or token < grid.prefix:
        return True
    valid = grid.valid if grid.valid.dim() == 1 else grid.valid[sample]
    return bool(valid[token - grid.prefix])


def conv_bias(weight: Tensor, head: int, here: tuple[int, int] | None, there: tuple[int, int] | None) -> float:
    """w of eq. 4: by offset within the window, 0 elsewhere."""
    if here is None or there is None:
        return 0.0
    row, col = (there[axis] - here[axis] + weight.shape[1 + axis] // 2 for axis in (0, 1))
    inside = 0 <= row < weight.shape[1] and 0 <= col < weight.shape[2]
    return float(weight[head, row, col]) if inside else 0.0


def aft(query: Tensor, key: Tensor, value: Tensor, grid: Grid, bias, is_causal: bool = False) -> Tensor:
    """Eq. 2, with `bias(head, here, there)` for w, places being (row, column) or None."""
    batch, heads, count, width = query.shape
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for i in range(count):
                for c in range(width):
                    numerator = denominator = 0.0
                    for j in range(i + 1 if is_causal else count):
                        if not is_valid(j, grid, b):
                            continue
                        w = bias(h, place(i, grid, b), place(j, grid, b))
                        weight = math.exp(float(key[b, h, j, c % key.shape[3]]) + w)
                        numerator += weight * float(value[b, h, j, c])
                        denominator += weight
                    gate = 1 / (1 + math.exp(-float(query[b, h, i, c])))
                    out[b, h, i, c] = gate * numerator / denominator if denominator else 0.0
    return out
