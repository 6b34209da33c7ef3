"""Relative attention by brute force, one query at a time, from the formula alone.

This oracle shares no code with `relvit.ops`: Python loops over samples, heads and queries, and finds the table row of
each pair of tokens.
"""

import itertools
import math

import torch


def place(token, prefix, coords, height, width):
    """Return a token's (row, column), or None for a prefix token. `coords` is a list of pairs, None for the raster."""
    if token < prefix:
        return None
    if coords is None:
        return divmod(token - prefix, width)
    return coords[token - prefix]


def row_of(offset, distance, bucketing):
    """Return an offset's row among 2 * distance + 1: clipped, or iRPE's g(x) with alpha : beta : gamma = 1 : 2 : 8."""
    if bucketing == "clip" or distance == 0:
        return max(-distance, min(distance, offset)) + distance
    alpha, beta, gamma = distance / 2, distance, 4 * distance
    if abs(offset) <= alpha:
        return offset + distance
    stretched = alpha + math.log(abs(offset) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(min(beta, round(stretched)), offset)) + distance


def pair_entries(tables, head, query_place, key_places, bucketing, vector=True):
    """Compute a_ij of one query for each key: rows[dy] + cols[dx] or table[dy, dx]; None without tables.

    a_ij is zero if the query or the key has no place.
    """
    if tables is None:
        return None
    pairs = [None if None in (query_place, place) else (query_place, place) for place in key_places]
    joint, found = len(tables) == 1, []
    for number, table in enumerate(tables):
        if table.dim() > 1 + joint + vector:
            table = table[head]
        index = []
        for axis in (0, 1) if joint else (number,):
            distance = (table.shape[axis if joint else 0] - 1) // 2
            offsets = [0 if pair is None else pair[1][axis] - pair[0][axis] for pair in pairs]
            index.append([row_of(offset, distance, bucketing) for offset in offsets])
        found.append(table[tuple(index)])
    placed = torch.tensor([pair is not None for pair in pairs])
    return sum(found) * (placed[:, None] if vector else placed)


def rotate(tokens, sines_cosines, prefix, half):
    """Apply rotary embedding (Su et al. 2021, arXiv 2104.09864, eq. 34) to (B, heads, N, width), number by number.

    `sines_cosines` broadcasts to (B, heads, N - prefix, 2 width), sines first. Channel c is rotated together with its
    neighbour, or with `half` together with the channel half the width away.
    """
    batch, heads, count, width = tokens.shape
    spread = sines_cosines.expand(batch, heads, count - prefix, 2 * width)
    rotated = tokens.clone()
    for b in range(batch):
        for h in range(heads):
            for n in range(prefix, count):
                for c in range(width):
                    first = c < width // 2 if half else c % 2 == 0
                    step = width // 2 if half else 1
                    other = tokens[b, h, n, c + step] * -1 if first else tokens[b, h, n, c - step]
                    sine, cosine = spread[b, h, n - prefix, c], spread[b, h, n - prefix, width + c]
                    rotated[b, h, n, c] = cosine * tokens[b, h, n, c] + sine * other
    return rotated


def attention(
    query,
    key,
    value,
    terms,
    places,
    key_places=None,
    valid=None,
    mask=None,
    scale=None,
    position_query=None,
    position_key=None,
):
    """Compute the output of each sample, head and query, one by one; `terms` has the fields of `RelativeTerms`.

    `places[b][i]` is (row, column) or None; `valid[b][j]` says whether key j exists; `mask[b][h][i][j]` is added to the
    scaled logit, and -inf hides the key. Vectors of the tables are multiplied by `position_query` and `position_key`,
    contents by `query` and `key`.
    """
    position_query = query if position_query is None else position_query
    position_key = key if position_key is None else position_key
    key_places = places if key_places is None else key_places
    batch, heads, queries, width = query.shape
    scale = width**-0.5 if scale is None else scale
    mask = None if mask is None else torch.as_tensor(mask, dtype=query.dtype)
    out = []
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        hidden = [False] * key.shape[2] if mask is None else mask[b, h, i].isneginf().tolist()
        keys = [j for j in range(key.shape[2]) if not hidden[j] and (valid is None or valid[b][j])]
        here, there = places[b][i], [key_places[b][j] for j in keys]
        a_q, a_k, a_v = (
            pair_entries(t, h, here, there, terms.bucketing) for t in (terms.query, terms.key, terms.value)
        )
        bias = pair_entries(terms.bias, h, here, there, terms.bucketing, vector=False)
        logits = key[b, h, keys] @ query[b, h, i]
        if a_k is not None:
            logits = logits + a_k @ position_query[b, h, i]
        if a_q is not None:
            logits = logits + (a_q * position_key[b, h, keys]).sum(-1)
        if terms.axis_logits is not None:
            for axis, of_axis in enumerate(terms.axis_logits):
                with_zero = torch.cat((of_axis[b, h, i], of_axis.new_zeros(1)))
                logits = logits + with_zero[[-1 if place is None else place[axis] for place in there]]
        logits = scale * logits
        if bias is not None:
            logits = logits + bias
        if terms.channels is not None:
            of_queries, of_keys = (part.expand(batch, heads, -1, -1)[b, h] for part in terms.channels)
            logits = logits + of_keys[keys] @ of_queries[i]
        if mask is not None:
            logits = logits + mask[b, h, i, keys]
        values = value[b, h, keys] if a_v is None else value[b, h, keys] + a_v
        out.append(logits.softmax(0) @ values)
    return torch.stack(out).unflatten(0, (batch, heads, queries))
