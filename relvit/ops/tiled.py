"""Exact relative attention in tiles of queries, its backward written out.

Each tile forms its logits against all keys, and backward forms them again: N x N is never stored. A relative logit is a
row logit plus a column logit of the query, so the logits of a tile start as the sum of two small tensors, broadcast
over the key grid, to which the product with the keys is added in place; the row and column marginals of the attention,
which meet the value tables, are sums of the weights over columns and rows. So relative terms cost passes over a tile
that lies in the processor's cache, and no wider products, as in `fused`.

Backward as in flash attention (Dao et al. 2022, arXiv 2205.14135, appendix B.2): dS = P (dP - D), where D, the sum of
P dP over keys, equals the product of the result with its gradient; here too, where dP holds the value term's part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.channels import Pick, distances_of, join_tables, picks, places_of_queries
from relvit.ops.grid import Grid, key_mask, patch_coords, without_padding
from relvit.ops.longer import add_times_table, logits_of_keys, logits_of_queries, sum_by_entry, times_table
from relvit.ops.precision import without_autocast
from relvit.ops.terms import RelativeTerms

# Logits of one tile over samples and heads, for each thread that works on it: 2 MB in float32.
# Smaller tiles spend their time in Python and in waiting for the other threads, those of fewer queries on adding up the
# gradients of keys and values.
TILE_LOGITS = 1 << 19
LEAST_QUERIES = 64


class Keys(NamedTuple):
    """Where keys lie: a raster behind prefix tokens, or at rows and columns, (1 or B, 1, 1, Nk) int64.

    Prefix tokens have the row H and the column W, beyond the last.
    """

    height: int
    width: int
    prefix: int
    y: Tensor | None
    x: Tensor | None


class Job(NamedTuple):
    """What all tiles have in common besides contents; None where nothing is needed.

    Attributes:
        keys: where they lie.
        query_channels: two of (1 or B, Nq) int64, the channels of `key_logits` that belong to each query's row and
            column; one beyond the last for prefix tokens.
        value: pick of the value term.
        valid: (1 or B, Nk) booleans, which keys may be attended to.
        tile: samples and queries of one tile at the most: the same in backward, whatever thread runs it.
    """

    keys: Keys
    query_channels: tuple[Tensor, Tensor] | None
    value: Pick | None
    valid: Tensor | None
    is_causal: bool
    dropout_p: float
    seed: int
    scale: float
    tile: tuple[int, int]


def to_pairs(values: Tensor, keys: Keys, out: Tensor) -> None:
    """From a number per row and per column, (b, heads, T, H + W), to their sum for each key: into (b, heads, T, Nk)."""
    rows, cols = values.split((keys.height, keys.width), dim=-1)
    if keys.y is None:
        out[..., : keys.prefix] = 0
        torch.add(rows[..., None], cols[..., None, :], out=_raster(out, keys))
        return
    lead = rows.shape[:-1]
    y, x = (line.expand(*lead, -1) for line in (keys.y, keys.x))
    nowhere = values.new_zeros(*lead, 1)
    torch.gather(torch.cat((rows, nowhere), dim=-1), -1, y, out=out)
    out.add_(torch.cat((cols, nowhere), dim=-1).gather(-1, x))


def from_pairs(pairs: Tensor, keys: Keys, out: Tensor) -> None:
    """The transpose of `to_pairs`: sums over the keys of each row, and of each column, into (b, heads, T, H + W)."""
    rows, cols = out.split((keys.height, keys.width), dim=-1)
    if keys.y is None:
        raster = _raster(pairs, keys)
        torch.sum(raster, -1, out=rows)
        torch.sum(raster, -2, out=cols)
        return
    lead = pairs.shape[:-1]
    for line, size, sums in ((keys.y, keys.height, rows), (keys.x, keys.width, cols)):
        index = line.expand(*lead, -1)
        sums.copy_(pairs.new_zeros(*lead, size + 1).scatter_add_(-1, index, pairs)[..., :size])


def _raster(pairs: Tensor, keys: Keys) -> Tensor:
    """(..., Nk) without the prefix tokens: (..., H, W), in the same memory."""
    return pairs[..., keys.prefix :].unflatten(-1, (keys.height, keys.width))


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> Tensor:
    """Attention with relative terms, tile by tile; see `relvit.ops.relative_attention`."""
    key_grid = grid if key_grid is None else key_grid
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # At least single precision, as inside fused kernels: logits, softmax, sums over tiles would lose too much.
    dtype = query.dtype
    precision = torch.promote_types(dtype, torch.float32)
    query, key, value = (t.to(precision) for t in (query, key, value))
    position_query = query if position_query is None else position_query.to(precision)
    position_key = key if position_key is None else position_key.to(precision)
    with without_autocast(query.device):
        needed = picks(terms, grid, key_grid, query)
        valid = key_mask(key_grid)
        if valid is not None:
            position_key = without_padding(position_key, valid)
        query_logits = logits_of_queries(position_query, terms, needed, scale)
        key_logits = logits_of_keys(position_key, terms, needed)
        table = None if terms.value is None else join_tables(terms.value, needed.value.reach, value.dtype)
        job = Job(
            keys=_keys(key_grid, key.device),
            query_channels=None if terms.query is None else _query_channels(terms, grid, key_grid, query.device),
            value=needed.value,
            valid=valid,
            is_causal=is_causal,
            dropout_p=dropout_p,
            # Drawn from the generator that users seed; each tile's own follows from it, in backward again.
            seed=int(torch.randint(2**48, ())) if dropout_p else 0,
            scale=scale,
            tile=_tile_sizes(query, key),
        )
        result = Tiles.apply(query, key, value, query_logits, key_logits, table, attn_mask, job)
        return result.transpose(1, 2).to(dtype)


class Tiles(torch.autograd.Function):
    """All tiles, forward and backward.

    `apply(query, key, value, query_logits, key_logits, table, attn_mask, job)` -> (B, Nq, heads, value_dim): logits as
    `relvit.ops.longer` makes them, `table` the joined value table; each of the last four tensors may be None.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_logits: Tensor | None,
        key_logits: Tensor | None,
        table: Tensor | None,
        attn_mask: Tensor | None,
        job: Job,
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        given, (key, value) = (key, value), _without_padding(key, value, job)
        # Tokens before heads: so the projections have it.
        result = value.new_empty(batch, length, heads, value.shape[-1])
        marginals = on_entries = None
        if table is not None:
            marginals = value.new_empty(batch, length, heads, job.keys.height + job.keys.width)
        room = _room(query, key, job)
        for tile in _tiles(query, job):
            weights = _weights(query, key, query_logits, key_logits, attn_mask, job, tile, room)
            if job.dropout_p:
                weights *= _kept(weights, job, tile)
            _set_product(result[tile.samples, tile.queries].transpose(1, 2), weights, value[tile.samples])
            if table is not None:
                from_pairs(weights, _of(job.keys, tile), marginals[tile.samples, tile.queries].transpose(1, 2))
        if table is not None:
            on_entries = sum_by_entry(marginals, job.value, table.shape[-2])
            add_times_table(result, on_entries, table)
        ctx.save_for_backward(query, *given, query_logits, key_logits, table, attn_mask, on_entries, result)
        ctx.job = job
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Marked as differentiable once, it would be left out of second derivatives without a word.
            raise RuntimeError("backend 'tiled' has no second derivatives (create_graph=True): use backend='gathered'")
        # As forward; backward may run inside of a user's autocast.
        with without_autocast(grad.device):
            return _backward(ctx, grad)


def _backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, query_logits, key_logits, table, attn_mask, on_entries, result = ctx.saved_tensors
    job: Job = ctx.job
    key, value = _without_padding(key, value, job)
    tokens, grad, result = grad, grad.transpose(1, 2), result.transpose(1, 2)
    grad_marginals = grad_table = None
    if table is not None:
        per_entry = times_table(tokens, table.mT * job.scale).transpose(1, 2)
        grad_marginals = per_entry.gather(-1, job.value.index.expand(*per_entry.shape[:-1], -1))
        if table.dim() == 2:
            grad_table = on_entries.flatten(0, 2).mT @ tokens.flatten(0, 2)
        else:
            grad_table = torch.einsum("bnhe,bnhd->hed", on_entries, tokens)
    # The scale goes into products: gradients of logits, the largest tensors, need no pass of their own for it.
    mean = (grad * result).sum(-1, keepdim=True) * job.scale

    grad_query, grad_key, grad_value = (_empty_like(tensor) for tensor in (query, key, value))
    grad_query_logits = None if query_logits is None else _empty_like(query_logits)
    grad_key_logits = None if key_logits is None else torch.zeros_like(key_logits)
    grad_mask = torch.zeros_like(_with_four_axes(attn_mask)) if ctx.needs_input_grad[6] else None
    room, further_room = _room(query, key, job), _room(query, key, job)
    for tile in _tiles(query, job):
        samples, queries = tile.samples, tile.queries
        weights = _weights(query, key, query_logits, key_logits, attn_mask, job, tile, room)
        kept = _kept(weights, job, tile) if job.dropout_p else None
        tile.add_product(grad_value, (weights if kept is None else weights * kept).mT, grad[samples, :, queries])
        grad_weights = _part_of_room(further_room, weights.shape)
        if grad_marginals is not None:
            to_pairs(grad_marginals[samples, :, queries], _of(job.keys, tile), grad_weights)
        beta = 0.0 if grad_marginals is None else 1.0
        _add_product(grad_weights, grad[samples, :, queries], value[samples].mT, beta, job.scale)
        if kept is not None:
            grad_weights *= kept
        grad_logits = grad_weights.sub_(mean[samples, :, queries]).mul_(weights)
        if grad_mask is not None:
            part = _part_of_mask(grad_mask, tile)
            part += grad_logits.sum_to_size(part.shape) / job.scale
        _set_product(grad_query[samples, :, queries], grad_logits, key[samples])
        tile.add_product(grad_key, grad_logits.mT, query[samples, :, queries])
        if query_logits is not None:
            from_pairs(grad_logits, _of(job.keys, tile), grad_query_logits[samples, :, queries])
        if key_logits is not None:
            _from_queries(grad_logits, grad_key_logits[samples], job, tile)
    if grad_mask is not None:
        grad_mask = grad_mask.reshape(attn_mask.shape)
    return grad_query, grad_key, grad_value, grad_query_logits, grad_key_logits, grad_table, grad_mask, None


class Tile(NamedTuple):
    """Some samples and some of their queries; all heads and all keys."""

    number: int
    samples: slice
    queries: slice

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add to the samples' total over all their tiles, of which the first one sets it."""
        if self.queries.start == 0:
            _set_product(total[self.samples], left, right)
        else:
            _add_product(total[self.samples], left, right, 1.0, 1.0)


def _tile_sizes(query: Tensor, key: Tensor) -> tuple[int, int]:
    """How many samples and how many queries a tile has at the most."""
    _, heads, length, _ = query.shape
    most = TILE_LOGITS * torch.get_num_threads()
    step = max(LEAST_QUERIES, most // max(1, heads * key.shape[2]))
    group = max(1, most // max(1, heads * key.shape[2] * length)) if step >= length else 1
    return group, step


def _tiles(query: Tensor, job: Job) -> Iterator[Tile]:
    batch, _, length, _ = query.shape
    group, step = job.tile
    # Without queries one empty tile, which sets the gradients of keys and values to zero.
    starts = product(range(0, batch, group), range(0, max(1, length), step))
    for number, (sample, start) in enumerate(starts):
        yield Tile(number, slice(sample, sample + group), slice(start, min(length, start + step)))


def _room(query: Tensor, key: Tensor, job: Job) -> Tensor:
    """Memory for a tile's weights, for one tile after the other: fresh memory costs more than what is done in it."""
    batch, heads, length, _ = query.shape
    group, step = job.tile
    return query.new_empty(min(batch, group) * heads * min(length, step) * key.shape[2])


def _part_of_room(room: Tensor, shape: Sequence[int]) -> Tensor:
    return room[: math.prod(shape)].view(shape)


def _weights(
    query: Tensor,
    key: Tensor,
    query_logits: Tensor | None,
    key_logits: Tensor | None,
    attn_mask: Tensor | None,
    job: Job,
    tile: Tile,
    room: Tensor,
) -> Tensor:
    """The attention weights of a tile before dropout, (b, heads, T, Nk), in the memory of `room`."""
    samples, queries = tile.samples, tile.queries
    query, key = query[samples, :, queries], key[samples]
    logits = _part_of_room(room, (*query.shape[:3], key.shape[2]))
    if query_logits is not None:
        to_pairs(query_logits[samples, :, queries], _of(job.keys, tile), logits)
    if key_logits is not None:
        from_keys = _to_queries(key_logits[samples], job, tile)
        logits = from_keys if query_logits is None else logits.add_(from_keys)
    beta = 0.0 if query_logits is None and key_logits is None else job.scale
    _add_product(logits, query, key.mT, beta, job.scale)
    if attn_mask is not None:
        mask = _part_of_mask(_with_four_axes(attn_mask), tile)
        logits = logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)
    if job.is_causal:
        here, there = (torch.arange(size, device=key.device) for size in (queries.stop, key.shape[2]))
        logits.masked_fill_(there > here[queries.start :, None], -torch.inf)
    if job.valid is not None:
        logits.masked_fill_(~_slice(job.valid, samples)[:, None, None, :], -torch.inf)
    masked = attn_mask is not None or job.valid is not None
    empty = torch.isneginf(logits).all(dim=-1, keepdim=True) if masked else None
    # In place: fresh memory costs more than the arithmetic.
    weights = torch.softmax(logits, -1, out=logits)
    # A query that may attend to nothing gets zeros, forward and backward, instead of NaN.
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


def _without_padding(key: Tensor, value: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros in the place of padding: a weight of zero times NaN would be NaN."""
    return (key, value) if job.valid is None else tuple(without_padding(t, job.valid) for t in (key, value))


def _kept(weights: Tensor, job: Job, tile: Tile) -> Tensor:
    """By how much dropout multiplies each weight: the same whenever this tile is asked for."""
    if weights.is_meta:  # has no generators
        return torch.empty_like(weights)
    generator = torch.Generator(weights.device).manual_seed(job.seed + tile.number)
    kept = 1 - job.dropout_p
    return torch.empty_like(weights).bernoulli_(kept, generator=generator).mul_(1 / kept if kept else 0.0)


def _to_queries(key_logits: Tensor, job: Job, tile: Tile) -> Tensor:
    """From each key's number per row and column, (b, heads, Nk, C), to the sum for each query, (b, heads, T, Nk)."""
    by_channel = F.pad(key_logits, (0, 1)).mT.contiguous()
    total = None
    for index in _query_index(by_channel, job, tile):
        part = by_channel.gather(-2, index.expand(*by_channel.shape[:2], -1, by_channel.shape[-1]))
        total = part if total is None else total.add_(part)
    return total


def _from_queries(pairs: Tensor, key_logits: Tensor, job: Job, tile: Tile) -> None:
    """Add the transpose of `_to_queries` to `key_logits`."""
    batch, heads, _, keys = pairs.shape
    by_channel = pairs.new_zeros(batch, heads, key_logits.shape[-1] + 1, keys)
    for index in _query_index(by_channel, job, tile):
        by_channel.scatter_add_(-2, index.expand(batch, heads, -1, keys), pairs)
    key_logits += by_channel[:, :, :-1].mT


def _query_index(by_channel: Tensor, job: Job, tile: Tile) -> Iterator[Tensor]:
    for channels in job.query_channels:
        yield _slice(channels, tile.samples)[:, None, tile.queries, None]


def _query_channels(terms: RelativeTerms, grid: Grid, key_grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    places = places_of_queries(distances_of(terms.query), terms.bucketing, grid, key_grid)
    (top, height), (left, width) = places
    coords = patch_coords(grid, device)
    coords = coords if coords.dim() == 3 else coords[None]
    # Queries beyond the outermost place count as in it.
    y = (coords[..., 0] - top).clamp(0, height - 1)
    x = (coords[..., 1] - left).clamp(0, width - 1) + height
    y, x = (F.pad(line, (grid.prefix, 0), value=height + width) for line in (y, x))
    return y, x


def _keys(grid: Grid, device: torch.device) -> Keys:
    if grid.coords is None:
        return Keys(grid.height, grid.width, grid.prefix, None, None)
    coords = patch_coords(grid, device)
    coords = coords if coords.dim() == 3 else coords[None]
    ends = zip(coords.unbind(-1), (grid.height, grid.width), strict=True)
    y, x = (F.pad(line, (grid.prefix, 0), value=end)[:, None, None] for line, end in ends)
    return Keys(grid.height, grid.width, grid.prefix, y, x)


def _of(keys: Keys, tile: Tile) -> Keys:
    """The keys of a tile's samples."""
    if keys.y is None:
        return keys
    return keys._replace(y=_slice(keys.y, tile.samples), x=_slice(keys.x, tile.samples))


def _slice(tensor: Tensor, part: slice, axis: int = 0) -> Tensor:
    """A part of an axis, all of it where it has one entry for all."""
    return tensor if tensor.shape[axis] == 1 else tensor[(slice(None),) * axis + (part,)]


def _part_of_mask(mask: Tensor, tile: Tile) -> Tensor:
    return _slice(_slice(mask, tile.samples), tile.queries, axis=2)


def _with_four_axes(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.dim())]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """(b, heads, ., .) by (b, heads, ., .); one sample's heads need no copy, however they lie in memory."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _set_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total <- left right; for one sample straight into its memory, wherever heads lie there."""
    if total.shape[0] == 1:
        torch.bmm(left[0], right[0], out=total[0])
    else:
        total.copy_(_product(left, right))


def _add_product(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """total <- beta total + alpha left right, in place."""
    total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=beta, alpha=alpha)


def _empty_like(tensor: Tensor) -> Tensor:
    """(B, heads, N, dim) with tokens before heads in memory, as the projection's gradient wants it."""
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)
