"""Relative attention by brute force, one pair of tokens at a time, from the formula alone.

Deliberately shares nothing with `relvit.ops`: plain Python loops over samples, heads, queries and keys.
"""

import math

import torch


def place(token, prefix, coords, height, width):
    """(row, column) of a token, or None for a prefix token. `coords` is a list of pairs or None for the raster."""
    if token < prefix:
        return None
    if coords is None:
        return divmod(token - prefix, width)
    return coords[token - prefix]


def row_of(offset, distance, bucketing):
    """Row of a table of 2 * distance + 1 rows: clipped, or iRPE's g(x) with alpha : beta : gamma = 1 : 2 : 8."""
    if bucketing == "clip" or distance == 0:
        return max(-distance, min(distance, offset)) + distance
    alpha, beta, gamma = distance / 2, distance, 4 * distance
    if abs(offset) <= alpha:
        return offset + distance
    stretched = alpha + math.log(abs(offset) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(min(beta, round(stretched)), offset)) + distance


def pair_entry(tables, head, query_place, key_place, bucketing, vector=True):
    """rows[dy] + cols[dx] or table[dy, dx], key minus query, of a head; None without a place or without tables."""
    if tables is None or query_place is None or key_place is None:
        return None
    if len(tables) == 1:  # joint
        (table,) = tables
        if table.dim() == (4 if vector else 3):
            table = table[head]
        row, col = (
            row_of(end - start, (size - 1) // 2, bucketing)
            for start, end, size in zip(query_place, key_place, table.shape[:2], strict=True)
        )
        return table[row, col]
    total = 0
    for table, start, end in zip(tables, query_place, key_place, strict=True):
        if table.dim() == (3 if vector else 2):
            table = table[head]
        total = total + table[row_of(end - start, (table.shape[0] - 1) // 2, bucketing)]
    return total


def rotate(tokens, sines_cosines, prefix, half):
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864, eq. 34) of (B, heads, N, width), one number at a time.

    `sines_cosines` broadcasts to (B, heads, N - prefix, 2 width), sines first. Channel c turns with its neighbour, or
    with `half` with the channel half the width away.
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
    """Output for each sample, head and query; `terms` has the fields of `RelativeTerms`.

    `places[b][i]` is (row, column) or None; `valid[b][j]` says whether key j exists; `mask[b][h][i][j]` is added to the
    scaled logit, -inf hides the key; vectors of the tables meet `position_query` and `position_key`, contents `query`
    and `key`.
    """
    position_query = query if position_query is None else position_query
    position_key = key if position_key is None else position_key
    key_places = places if key_places is None else key_places
    batch, heads, queries, width = query.shape
    scale = width**-0.5 if scale is None else scale
    samples = []
    for b in range(batch):
        per_sample = []
        for h in range(heads):
            for i in range(queries):
                logits, values = [], []
                for j in range(key.shape[2]):
                    if valid is not None and not valid[b][j]:
                        continue
                    if mask is not None and mask[b][h][i][j] == -math.inf:
                        continue
                    pair = (h, places[b][i], key_places[b][j], terms.bucketing)
                    a_q, a_k, a_v = (pair_entry(t, *pair) for t in (terms.query, terms.key, terms.value))
                    bias = pair_entry(terms.bias, *pair, vector=False)
                    logit = (query[b, h, i] * key[b, h, j]).sum()
                    if a_k is not None:
                        logit = logit + (position_query[b, h, i] * a_k).sum()
                    if a_q is not None:
                        logit = logit + (position_key[b, h, j] * a_q).sum()
                    if terms.axis_logits is not None and key_places[b][j] is not None:
                        for of_axis, coordinate in zip(terms.axis_logits, key_places[b][j], strict=True):
                            logit = logit + of_axis[b, h, i, coordinate]
                    logit = scale * logit
                    if bias is not None:
                        logit = logit + bias
                    if terms.channels is not None:
                        of_queries, of_keys = (part.expand(batch, heads, -1, -1)[b, h] for part in terms.channels)
                        logit = logit + (of_queries[i] * of_keys[j]).sum()
                    if mask is not None:
                        logit = logit + mask[b][h][i][j]
                    logits.append(logit)
                    values.append(value[b, h, j] if a_v is None else value[b, h, j] + a_v)
                if logits:
                    weights = torch.stack(logits).softmax(0)
                    per_sample.append((weights[:, None] * torch.stack(values)).sum(0))
                else:
                    per_sample.append(value.new_zeros(value.shape[-1]))
        samples.append(torch.stack(per_sample).reshape(heads, queries, -1))
    return torch.stack(samples)
