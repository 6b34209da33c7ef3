"""The longer vectors themselves: contents, logits and indicators side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from relvit.ops.channels import Channels, Pick, Picks, join_tables, with_width
from relvit.ops.precision import without_autocast
from relvit.ops.recompute import pick_from
from relvit.ops.terms import AxisTables, RelativeTerms


def logits_of_queries(query: Tensor, terms: RelativeTerms, picks: Picks, scale: float) -> Tensor | None:
    """What the key term and the bias add to the logit of a key in each row and column: (B, heads, Nq, H + W)."""
    logits = None if terms.key is None else axis_logits(query, terms.key, picks.key)
    if terms.bias is None:
        return logits
    # In the tables' precision, for the sake of the sums over all tokens in backward.
    table = join_tables(with_width(terms.bias), picks.bias.reach, terms.bias.rows.dtype)[..., 0] / scale
    # (1 or B, heads, Nq, H + W): samples on one grid share the result.
    heads, index = query.shape[1], picks.bias.index
    entries = table.expand(heads, -1)[None, :, None].expand(index.shape[0], heads, index.shape[2], -1)
    bias = entries.gather(-1, index.expand(-1, heads, -1, -1)).to(query.dtype)
    return bias.expand(query.shape[0], -1, -1, -1) if logits is None else logits + bias


def logits_of_keys(key: Tensor, terms: RelativeTerms, picks: Picks) -> Tensor | None:
    """What the query term adds to the logit of a query in each row and column: (B, heads, Nk, H' + W')."""
    if terms.query is None:
        return None
    # Seen from the key, the offset to the query is the other way round.
    mirrored = AxisTables(terms.query.rows.flip(-2), terms.query.cols.flip(-2))
    return axis_logits(key, mirrored, picks.query)


def axis_logits(query: Tensor, tables: AxisTables, pick: Pick) -> Tensor:
    """query_i . rows[r - y_i] for all places r, then the same for columns: (B, heads, N, H + W).

    One product with all table rows, then a choice, is faster than a product per row of the grid: the tables are short.
    """
    table = join_tables(tables, pick.reach, query.dtype)
    # Head by head: that neither makes nor keeps a copy of queries which lie in memory as the projection has left them.
    by_head = query.permute(1, 0, 2, 3).flatten(1, 2)
    per_offset = torch.bmm(by_head, table.expand(query.shape[1], -1, -1).transpose(-2, -1))
    per_offset = per_offset.unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)
    return pick_from(per_offset, pick.index.expand(*per_offset.shape[:-1], -1))


def lengthen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_logits: Tensor | None,
    key_logits: Tensor | None,
    appended: Channels,
) -> list[Tensor]:
    """Queries, keys and values with all that is appended to them, (B, heads, N, width) each."""
    if appended.padding is not None:
        key, value = (tensor.masked_fill(~appended.padding.valid, 0.0) for tensor in (key, value))
    long_query, long_key, long_value = [query], [key], [value]
    if query_logits is not None:
        long_query.append(query_logits)
        long_key.append(appended.key_hot)
    if key_logits is not None:
        long_query.append(appended.query_hot)
        long_key.append(key_logits)
    if appended.padding is not None:
        long_query.append(appended.padding.on_query.expand(*query.shape[:-1], 1))
        long_key.append(appended.padding.on_key)
    if appended.picks.value is not None:
        long_value.append(appended.key_hot)
    return [join(parts, appended.width) for parts in (long_query, long_key, long_value)]


def join(parts: list[Tensor], width: int) -> Tensor:
    """Concatenate channels after broadcasting the leading dimensions to the first part's, zeros up to `width`.

    In memory tokens come before heads, as the projections have it: so the attention writes its output as well.
    """
    lead = parts[0].shape[:-1]
    missing = width - sum(part.shape[-1] for part in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(()).expand(*lead, missing)]
    return torch.cat([part.expand(*lead, -1).transpose(1, 2) for part in parts], dim=-1).transpose(1, 2)


def shorten(out: Tensor, content: int, table: Tensor | None, appended: Channels) -> Tensor:
    """From the longer output the content's `content` channels plus, with a value table, the value term.

    The channels after the content are the marginals: how much of the attention falls on each row and each column.
    """
    result = out[..., :content]
    if table is not None:
        # Tokens before heads: so the attention writes its output, and so the projection wants it.
        places = appended.picks.value.index.shape[-1]
        parts = out.transpose(1, 2).split((content, places, out.shape[-1] - content - places), dim=-1)
        # Half precision is left for sums over several marginals, and rounded to once, as by stock attention.
        precision = torch.promote_types(out.dtype, torch.float32)
        on_entries = sum_by_entry(parts[1].to(precision), appended.picks.value, table.shape[-2])
        with without_autocast(out.device):
            result = (parts[0] + times_table(on_entries, table.to(precision))).to(out.dtype).transpose(1, 2)
    return result


def sum_by_entry(marginals: Tensor, pick: Pick, entries: int) -> Tensor:
    """Sum the marginals (B, Nq, heads, H + W) that meet the same table entry: (B, Nq, heads, entries)."""
    index = pick.index.transpose(1, 2).expand_as(marginals)
    return marginals.new_zeros(*marginals.shape[:-1], entries).scatter_add(-1, index, marginals)


def times_table(weights: Tensor, table: Tensor) -> Tensor:
    """(B, N, heads, entries) by a table ([heads,] entries, dim) -> (B, N, heads, dim)."""
    return weights @ table if table.dim() == 2 else torch.einsum("bnhe,hed->bnhd", weights, table)


def add_times_table(result: Tensor, weights: Tensor, table: Tensor) -> None:
    """Add `times_table` to a contiguous (B, N, heads, dim), in place: fresh memory costs as much as the product."""
    if table.dim() == 2:
        result.view(-1, result.shape[-1]).addmm_(weights.flatten(0, 2), table)
    else:
        result += times_table(weights, table)
