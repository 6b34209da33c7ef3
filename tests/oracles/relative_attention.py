"""Relative attention by brute force, one pair of tokens at a time, from the formula alone.

Deliberately shares nothing with `relvit.ops`: plain Python loops over samples, heads, queries and keys.
"""

import torch


def place(token, prefix, coords, height, width):
    """(row, column) of a token, or None for a prefix token. `coords` is a list of pairs or None for the raster."""
    if token < prefix:
        return None
    if coords is None:
        return divmod(token - prefix, width)
    return coords[token - prefix]


def clip(offset, distance):
    return max(-distance, min(distance, offset))


def pair_vector(rows, cols, query_place, key_place):
    """w_row[clip(dy)] + w_col[clip(dx)], key minus query; None without a place."""
    if query_place is None or key_place is None:
        return None
    k_row, k_col = (rows.shape[0] - 1) // 2, (cols.shape[0] - 1) // 2
    dy, dx = key_place[0] - query_place[0], key_place[1] - query_place[1]
    return rows[clip(dy, k_row) + k_row] + cols[clip(dx, k_col) + k_col]


def attention(query, key, value, key_tables, value_tables, places, key_places=None, valid=None, bias=None, scale=None):
    """`places[b][i]` is (row, column) or None; tables are (rows, cols) or None, each (heads, R, d) or (R, d).

    `valid[b][j]` says whether key j exists; `bias[b][h][i][j]` is added to the scaled logit.
    """
    key_places = places if key_places is None else key_places
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    scale = width**-0.5 if scale is None else scale
    per_head = lambda table, h: table[h] if table.dim() == 3 else table  # noqa: E731
    samples = []
    for b in range(batch):
        per_sample = []
        for h in range(heads):
            k_tab = None if key_tables is None else [per_head(t, h) for t in key_tables]
            v_tab = None if value_tables is None else [per_head(t, h) for t in value_tables]
            for i in range(queries):
                logits, values = [], []
                for j in range(keys):
                    if valid is not None and not valid[b][j]:
                        continue
                    k_vec, v_vec = key[b, h, j], value[b, h, j]
                    a_k = None if k_tab is None else pair_vector(*k_tab, places[b][i], key_places[b][j])
                    a_v = None if v_tab is None else pair_vector(*v_tab, places[b][i], key_places[b][j])
                    k_vec = k_vec if a_k is None else k_vec + a_k
                    v_vec = v_vec if a_v is None else v_vec + a_v
                    logit = scale * (query[b, h, i] * k_vec).sum()
                    if bias is not None:
                        logit = logit + bias[b][h][i][j]
                    logits.append(logit)
                    values.append(v_vec)
                if logits:
                    weights = torch.stack(logits).softmax(0)
                    per_sample.append((weights[:, None] * torch.stack(values)).sum(0))
                else:
                    per_sample.append(value.new_zeros(value.shape[-1]))
        samples.append(torch.stack(per_sample).reshape(heads, queries, -1))
    return torch.stack(samples)
