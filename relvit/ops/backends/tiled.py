"""Relative attention on the CPU: one tile of queries after the other, backward by hand, dropout redrawn from its seed.

Each tile forms its logits against all keys, and backward recomputes them, so N x N logits are never stored. A relative
logit is a row logit plus a column logit of the query. So the logits of a tile start as the sum of these two small
tensors, broadcast over the key grid, and the product of queries and keys is added in place. The value tables are
multiplied by the attention's marginals, which are the sums of the weights over each row and each column of keys.

So relative terms cost only passes over a tile that fits into the CPU's cache, and products stay narrow, unlike in
`fused`. GPUs take this backend in float64, and where the augmented vectors of `fused` would be too wide and `triton`
cannot compute the inputs.

Backward is computed as in flash attention (Dao et al. 2022, arXiv 2205.14135, appendix B.2). With the attention weights
P and their gradient dP, the gradient of the logits is P (dP - D). D, the sum of P dP over all keys, equals the dot
product of a query's result and its gradient; this also holds here, where dP includes the value term.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.backends.axis_logits import (
    Axes,
    clip_distances,
    entry_logits,
    grid_axes,
    join_tables,
    joined_with_index,
    key_logits,
    query_axes,
    query_logits,
    table_index,
    times_table,
)
from relvit.ops.backends.by_heads import run, threads_by_heads
from relvit.ops.backends.pair_bias import from_slices, offset_table, rows_of, to_slices, write_bias
from relvit.ops.backends.pair_logits import Positions, from_pairs, from_queries, to_pairs, to_queries, token_positions
from relvit.ops.backends.tile import Operands, Tile, TileConfig, add_product, new_tokens, part_of, set_product
from relvit.ops.checks import check_backward
from relvit.ops.grid import key_mask, without_padding
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisTables
from relvit.ops.tracing import without_autocast

# A tile has at most this number of logits per thread that works on it, 4 MB in float32, but at least `LEAST_QUERIES`
# queries. Smaller tiles lose time in Python and in waiting for other threads; tiles with fewer queries lose time in
# adding up the gradients of keys.
TILE_LOGITS = 1 << 20
LEAST_QUERIES = 64


def relative_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention with relative terms, tile by tile; see `relvit.ops.relative_attention`."""
    query, key, value, terms, grid, key_grid, mask, *_ = inputs
    with without_autocast(query.device):
        valid, axes, axes_of_queries = key_mask(key_grid), grid_axes(key_grid), query_axes(inputs)
        if valid is not None:
            inputs = inputs._replace(position_key=without_padding(inputs.position_key, valid))
        value_index = table = None
        if terms.value is not None:
            table, value_index = joined_with_index(terms.value, terms.bucketing, grid, axes, value)
        of_queries, logits_index = _query_logits(inputs, axes)
        of_keys = key_logits(inputs, axes_of_queries)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        keys = Positions(key_grid.height, key_grid.width, key_grid.prefix)
        config = TileConfig(
            grids=(grid, key_grid),
            keys=keys if key_grid.coords is None else token_positions(key_grid, axes, query.device, -2),
            queries=None if of_keys is None else token_positions(grid, axes_of_queries, query.device, -1),
            logits_index=logits_index,
            value_index=value_index,
            valid=valid,
            is_causal=inputs.is_causal,
            dropout_p=inputs.dropout_p,
            # Draw the seed from PyTorch's generator of the CPU, whatever the default device is: users seed it, and
            # checkpoints restore it. Each tile adds its number to the seed, so backward drops the same weights.
            seed=int(torch.randint(2**48, (), device="cpu")) if inputs.dropout_p else 0,
            scale=inputs.scale,
            size=tile_size(query, key),
            threads=threads_by_heads(query, key),
        )
        operands = Operands(query, key, value, of_queries, of_keys, offset_table(inputs), table, mask)
        return Tiles.apply(*operands, config).transpose(1, 2)


def _query_logits(inputs: AttentionInputs, axes: Axes) -> tuple[Tensor | None, Tensor | None]:
    """Return the `query_logits` of `Operands` and their `logits_index`."""
    query, terms = inputs.position_query, inputs.terms
    if terms.key is not None and terms.axis_logits is None and not isinstance(terms.bias, AxisTables):
        reach, index = table_index(inputs.grid, clip_distances(terms.key), terms.bucketing, axes, query.device)
        # If the grid has at least as many rows and columns as the tables have entries, keep logits by table entry until
        # backward: they take no more memory than logits by row and column, except for the joined table's zero rows.
        if 2 * sum(reach) + 2 <= index.shape[-1]:
            by_entry = entry_logits(query, join_tables(terms.key, reach, query.dtype))
            return by_entry.transpose(0, 1), index
    return query_logits(inputs, axes), None


class Tiles(torch.autograd.Function):
    """All tiles, forward and backward: `apply(*operands, config)` -> (B, Nq, heads, value_dim)."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Tensor | TileConfig | None) -> Tensor:
        given, config = Operands(*arguments[:-1]), arguments[-1]
        ctx.config = config
        stock = _is_stock(given, config)
        operands = _prepared(given, config, 1.0 if stock else config.scale)
        query, value, table = operands.query, operands.value, operands.table
        batch, heads, length, _ = query.shape
        # Store tokens before heads: then the layer joins the heads for the output projection without a copy.
        result = value.new_empty(batch, length, heads, value.shape[-1])
        on_entries = None if table is None else value.new_zeros(batch, length, heads, table.shape[-2])

        def compute(tiles: Iterable[Tile]) -> None:
            workspace = _new_workspace(operands, config)
            for tile in tiles:
                if stock:
                    tile.of(result.transpose(1, 2)).copy_(_stock_attention(operands, config, tile, workspace))
                    continue
                *vectors, values = tile.contents(query, operands.key, value)
                weights = _weights(*vectors, operands, config, tile, workspace)
                if config.dropout_p:
                    weights *= _dropout_multiplier(weights, config, tile)
                set_product(tile.of(result.transpose(1, 2)), weights, values)
                if on_entries is not None:
                    _add_by_axis(weights, config, tile, on_entries.transpose(1, 2), config.value_index)

        run(compute, _tiles(query, config), config.threads)
        # Add the products with the value table in place: allocating memory for them would take as long as the products.
        if table is not None and table.dim() == 2:
            result.view(-1, result.shape[-1]).addmm_(on_entries.flatten(0, 2), table)
        elif table is not None:
            result += times_table(on_entries, table)
        ctx.save_for_backward(*given, on_entries, result)
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("tiled", grad)
        # Users may call backward inside of autocast, but forward ran without autocast, so switch it off here, too.
        with without_autocast(grad.device):
            *operands, on_entries, result = ctx.saved_tensors
            wants_mask = ctx.needs_input_grad[Operands._fields.index("attn_mask")]
            return *_backward(grad, Operands(*operands), on_entries, result, ctx.config, wants_mask), None


def _backward(
    grad: Tensor, operands: Operands, on_entries: Tensor | None, result: Tensor, config: TileConfig, wants_mask: bool
) -> Operands:
    offsets, operands, scale = operands.pair_bias, _prepared(operands, config, config.scale), config.scale
    *contents, query_logits, key_logits, pair_bias, table, mask = operands
    tokens, grad, result = grad, grad.transpose(1, 2), result.transpose(1, 2)
    grad_on_entries = grad_table = None
    if table is not None:
        grad_on_entries = times_table(tokens, table.mT * scale).transpose(1, 2)
        if table.dim() == 2:
            grad_table = on_entries.flatten(0, 2).mT @ tokens.flatten(0, 2)
        else:
            grad_table = torch.einsum("bnhe,bnhd->hed", on_entries, tokens)
    # Matrix products apply the scale, so that no extra pass over the gradients of logits, the largest tensors, has to
    # apply it.
    mean = (grad * result).sum(-1, keepdim=True) * scale

    grad_query, grad_key, grad_value = (new_tokens(tensor, tensor.shape[-1]) for tensor in contents)
    grad_query_logits = None if query_logits is None else new_tokens(query_logits, query_logits.shape[-1]).zero_()
    grad_key_logits = None if key_logits is None else torch.zeros_like(key_logits)
    grad_pair_bias = None if pair_bias is None else torch.zeros_like(pair_bias)
    # Tiles add to the gradient of a mask in the dtype of the weights; autograd converts the sum to the mask's dtype.
    grad_mask = torch.zeros_like(mask, dtype=result.dtype) if wants_mask else None

    def compute(tiles: Iterable[Tile]) -> None:
        workspace, second_workspace = _new_workspace(operands, config), _new_workspace(operands, config)
        for tile in tiles:
            keys = tile.positions(config.keys)
            query, key, value, gradient = tile.contents(operands.query, operands.key, operands.value, grad)
            weights = _weights(query, key, operands, config, tile, workspace)
            multiplier = _dropout_multiplier(weights, config, tile) if config.dropout_p else None
            dropped = weights if multiplier is None else weights * multiplier
            tile.add_product(grad_value, dropped.mT, gradient)
            grad_weights = second_workspace[: weights.numel()].view(weights.shape)
            if grad_on_entries is not None:
                to_pairs(_by_axis(grad_on_entries, tile, config.value_index), keys, grad_weights)
            beta = 0.0 if grad_on_entries is None else 1.0
            add_product(grad_weights, gradient, value.mT, beta, scale)
            if multiplier is not None:
                grad_weights *= multiplier
            grad_logits = grad_weights.sub_(tile.of(mean)).mul_(weights)
            if grad_mask is not None:
                part = tile.of(grad_mask)
                part += grad_logits.sum_to_size(part.shape) / scale
            set_product(tile.of(grad_query), grad_logits, key)
            tile.add_product(grad_key, grad_logits.mT, query)
            if grad_query_logits is not None:
                _add_by_axis(grad_logits, config, tile, grad_query_logits, config.logits_index)
            if grad_key_logits is not None:
                from_queries(grad_logits, tile.positions(config.queries), tile.all_tokens(grad_key_logits))
            if grad_pair_bias is not None:
                of_all = grad_logits[0]
                if len(grad_logits) > 1:
                    # The attention weights in `workspace` are no longer needed, so the sum takes their memory.
                    of_all = torch.sum(grad_logits, 0, out=workspace[: of_all.numel()].view(of_all.shape))
                slices = part_of(grad_pair_bias, 0, tile.heads)
                for part, total in rows_of(of_all, slices, tile.queries, *config.grids):
                    total += part

    # The gradient of a mask may be a sum over heads, to which several threads must not add: one thread computes all
    # tiles.
    run(compute, _tiles(operands.query, config), 1 if wants_mask else config.threads)
    if grad_pair_bias is not None:
        grad_pair_bias = from_slices(grad_pair_bias / scale, offsets)
    return Operands(
        grad_query, grad_key, grad_value, grad_query_logits, grad_key_logits, grad_pair_bias, grad_table, grad_mask
    )


def tile_size(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """Return the largest numbers of samples, heads and queries of a tile."""
    _, heads, length, _ = query.shape
    threads = torch.get_num_threads() if threads_by_heads(query, key) == 1 else 1
    most, of_sample = TILE_LOGITS * threads, max(1, heads * length * key.shape[2])
    if of_sample <= most:
        return most // of_sample, heads, max(1, length)
    # A tile has few heads and many queries, because products of few queries are slow.
    heads = min(heads, threads)
    return 1, heads, max(LEAST_QUERIES, most // (heads * key.shape[2]))


def _tiles(query: Tensor, config: TileConfig) -> Iterator[Tile]:
    batch, heads, length, _ = query.shape
    # Without queries there is one empty tile, which sets the gradients of keys and values to zero.
    starts = (range(0, end, step) for end, step in zip((batch, heads, max(1, length)), config.size, strict=True))
    for number, start in enumerate(product(*starts)):
        stop = (min(at + step, end) for at, step, end in zip(start, config.size, query.shape, strict=False))
        yield Tile(number, *(slice(*ends) for ends in zip(start, stop, strict=True)))


def _new_workspace(operands: Operands, config: TileConfig) -> Tensor:
    """Allocate memory that tiles use in turn for their weights: fresh memory costs more time than the arithmetic."""
    shape = (min(most, size) for most, size in zip(config.size, operands.query.shape[:3], strict=True))
    return operands.query.new_empty(math.prod(shape) * operands.key.shape[2])


def _weights(
    query: Tensor, key: Tensor, operands: Operands, config: TileConfig, tile: Tile, workspace: Tensor
) -> Tensor:
    """Compute a tile's weights before dropout, (samples, heads, queries, Nk), in the memory of `workspace`."""
    shape = (*query.shape[:3], key.shape[2])
    logits = workspace[: math.prod(shape)].view(shape)
    beta = 0.0
    if operands.query_logits is not None:
        by_axis = _by_axis(operands.query_logits, tile, config.logits_index)
        to_pairs(by_axis, tile.positions(config.keys), logits)
        beta = config.scale
    if operands.pair_bias is not None:
        slices = part_of(operands.pair_bias, 0, tile.heads)
        if beta:
            for pairs, bias in rows_of(logits, slices, tile.queries, *config.grids):
                pairs += bias
        else:
            write_bias(slices, logits, tile.queries, *config.grids)
        beta = config.scale
    if operands.key_logits is not None:
        from_keys = to_queries(tile.all_tokens(operands.key_logits), tile.positions(config.queries))
        logits = logits.add_(from_keys) if beta else from_keys
        beta = config.scale
    add_product(logits, query, key.mT, beta, config.scale)
    if operands.attn_mask is not None:
        mask = tile.of(operands.attn_mask)
        logits = logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)
    if config.is_causal:
        here, there = (torch.arange(size, device=key.device) for size in (tile.queries.stop, key.shape[2]))
        logits.masked_fill_(there > here[tile.queries.start :, None], -torch.inf)
    if config.valid is not None:
        logits.masked_fill_(~tile.of(config.valid[:, None, None]), -torch.inf)
    masked = operands.attn_mask is not None or config.valid is not None
    empty = torch.isneginf(logits).all(dim=-1, keepdim=True) if masked else None
    # Softmax writes into the logits, because allocating memory would take longer than the arithmetic.
    weights = torch.softmax(logits, -1, out=logits)
    # Softmax of a row that holds only -inf would give NaN, so a query that may attend to no key gets zeros, forward and
    # backward.
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


def _is_stock(operands: Operands, config: TileConfig) -> bool:
    """Return True where stock attention computes the result of a tile, with the pair bias as its mask."""
    others = (operands.query_logits, operands.key_logits, operands.table)
    if operands.pair_bias is None or any(tensor is not None for tensor in others):
        return False
    return not config.is_causal and not config.dropout_p


def _stock_attention(operands: Operands, config: TileConfig, tile: Tile, workspace: Tensor) -> Tensor:
    """Attend from a tile's queries by PyTorch's fused kernel, which passes over logits once, in another order."""
    query, (key, value) = tile.of(operands.query), map(tile.all_tokens, (operands.key, operands.value))
    shape = (1, *query.shape[1:3], key.shape[2])
    bias = workspace[: math.prod(shape)].view(shape)
    write_bias(part_of(operands.pair_bias, 0, tile.heads), bias, tile.queries, *config.grids)
    if operands.attn_mask is not None:
        mask = tile.of(operands.attn_mask)
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    if config.valid is not None:
        bias = bias.masked_fill(~tile.of(config.valid[:, None, None]), -torch.inf)
    # PyTorch's kernel needs queries and values of equal widths: fill narrower values up with zeros, and cut the result.
    width = value.shape[-1]
    if query.shape[-1] > width:
        value = F.pad(value, (0, query.shape[-1] - width))
    return F.scaled_dot_product_attention(query, key, value, bias, scale=config.scale)[..., :width]


def _by_axis(numbers: Tensor, tile: Tile, index: Tensor | None) -> Tensor:
    """Look up the numbers of a tile's queries for each row and column, (samples, heads, queries, H + W)."""
    numbers = tile.of(numbers)
    return numbers if index is None else numbers.gather(-1, tile.of(index).expand(*numbers.shape[:-1], -1))


def _add_by_axis(pairs: Tensor, config: TileConfig, tile: Tile, total: Tensor, index: Tensor | None) -> None:
    """Add the transpose of `_by_axis`, of a tile's sums over rows and columns, to a total that starts as zeros."""
    total, keys = tile.of(total), tile.positions(config.keys)
    if index is None:
        from_pairs(pairs, keys, total)
        return
    sums = pairs.new_empty(*pairs.shape[:-1], keys.height + keys.width)
    from_pairs(pairs, keys, sums)
    total.scatter_add_(-1, tile.of(index).expand_as(sums), sums)


def _prepared(operands: Operands, config: TileConfig, scale: float) -> Operands:
    """Write out the slices of a pair bias divided by the scale; set padding to zero, as zero times NaN would be NaN."""
    if operands.pair_bias is not None:
        # Divide in the dtype of the queries: in half precision the quotient would round, or overflow.
        dtype = operands.query.dtype
        slices = to_slices(operands.pair_bias.to(dtype) / scale, config.grids[0].width, dtype)
        operands = operands._replace(pair_bias=slices)
    if config.valid is None:
        return operands
    key, value = (without_padding(tensor, config.valid) for tensor in (operands.key, operands.value))
    return operands._replace(key=key, value=value)


def _dropout_multiplier(weights: Tensor, config: TileConfig, tile: Tile) -> Tensor:
    """Draw the factor by which dropout multiplies each weight, the same in forward and backward of a tile."""
    if weights.is_meta:  # The meta device has no random number generator.
        return torch.empty_like(weights)
    generator = torch.Generator(weights.device).manual_seed(config.seed + tile.number)
    p = 1 - config.dropout_p
    return torch.empty_like(weights).bernoulli_(p, generator=generator).mul_(1 / p if p else 0.0)
