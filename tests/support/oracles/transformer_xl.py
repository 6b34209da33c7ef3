"""Transformer-XL's attention (Dai et al. 2019, arXiv 1901.02860, section 3.3) by brute force, one query at a time."""

import itertools
import math

import torch


def sinusoid(offset, width):
    """Compute R of an offset, query minus key: `width` sines, then `width` cosines, in Python's own arithmetic."""
    angles = [offset / 10000 ** (index / width) for index in range(width)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def attention(query, key, value, u, v, projection, places, key_places=None, valid=None, unit=(1, 1), most=math.inf):
    """Compute all outputs: softmax of ((q + u) . k + (q + v) . W_R R) / sqrt(d), times the values.

    `projection` is W_R, (heads head_dim, 4 F), whose first half multiplies the sinusoids of y. `places[b][i]` is (row,
    column), or None for a token without a place. Offsets are multiplied by `unit` before they are clipped at `most`.
    """
    key_places = places if key_places is None else key_places
    batch, heads, queries, dim = query.shape
    by_head = projection.unflatten(0, (heads, dim))
    out = []
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        keys = [j for j in range(key.shape[2]) if valid is None or valid[b][j]]
        positions = torch.zeros(len(keys), projection.shape[1], dtype=torch.float64)
        for number, j in enumerate(keys):
            here, there = places[b][i], key_places[b][j]
            if here is not None and there is not None:
                offsets = ((a - c) * by for a, c, by in zip(here, there, unit, strict=True))
                clipped = [max(-most, min(most, offset)) for offset in offsets]
                positions[number] = torch.cat([sinusoid(offset, projection.shape[1] // 4) for offset in clipped])
        logits = key[b, h, keys] @ (query[b, h, i] + u[h]) + (positions @ by_head[h].T) @ (query[b, h, i] + v[h])
        out.append((logits / math.sqrt(dim)).softmax(0) @ value[b, h, keys])
    return torch.stack(out).unflatten(0, (batch, heads, queries))
