"""Attention-free transformers (Zhai et al. 2021, arXiv 2105.14103) by the paper's equations, number by number."""

import itertools
import math

import torch
from oracles.relative_attention import place
from torch import Tensor

from relvit.ops import Grid


def tokens_of(grid: Grid, sample: int, count: int) -> tuple[list[tuple[int, int] | None], list[bool]]:
    """Return the place of each token, (row, column) or None for prefix tokens, and whether the token is not padding."""
    coords, valid = (
        None if part is None else (part[sample] if part.dim() == dims else part).tolist()
        for part, dims in ((grid.coords, 3), (grid.valid, 2))
    )
    places = [place(token, grid.prefix, coords, grid.height, grid.width) for token in range(count)]
    return places, [True] * grid.prefix + (valid or [True] * (count - grid.prefix))


def conv_bias(weight: Tensor, head: int, here: tuple[int, int] | None, there: tuple[int, int] | None) -> float:
    """Compute w of eq. 6: the weight of an offset within the window, and 0 elsewhere."""
    if here is None or there is None:
        return 0.0
    row, col = (there[axis] - here[axis] + weight.shape[1 + axis] // 2 for axis in (0, 1))
    inside = 0 <= row < weight.shape[1] and 0 <= col < weight.shape[2]
    return float(weight[head, row, col]) if inside else 0.0


def aft(query: Tensor, key: Tensor, value: Tensor, grid: Grid, bias, is_causal: bool = False) -> Tensor:
    """Compute eq. 2, with `bias(head, here, there)` for w; places are (row, column) or None."""
    batch, heads, count, width = query.shape
    out = torch.zeros_like(query)
    for b in range(batch):
        places, valid = tokens_of(grid, b, count)
        for h, i, c in itertools.product(range(heads), range(count), range(width)):
            numerator = denominator = 0.0
            for j in range(i + 1 if is_causal else count):
                if valid[j]:
                    weight = math.exp(float(key[b, h, j, c % key.shape[3]]) + bias(h, places[i], places[j]))
                    numerator += weight * float(value[b, h, j, c])
                    denominator += weight
            gate = 1 / (1 + math.exp(-float(query[b, h, i, c])))
            out[b, h, i, c] = gate * numerator / denominator if denominator else 0.0
    return out
