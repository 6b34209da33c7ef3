"""The backward kernels in Triton: one over query tiles, one over key tiles, so that no sum needs atomics.

As in FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.2) the attention weights P are recomputed from the
log-sum-exp, and the gradient of the logits is dS = P (dP - D), with dP the gradient of the weights and D the dot
product of a query's result and its gradient. Here dP is the dot product of the result's gradient and the sum of three
vectors: the value, and the value table's vectors for the key's row and column. `backward_queries` looks up products
with the value table, as it looks up logits.

Sums of dS along the axes of a tile are the gradients of row and column logits. These gradients are summed by table
entry. The sums times the key table are a part of the queries' gradient; the sums times the queries (computed in
PyTorch) are the gradient of the key table.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.forward import place_of, store_entries, store_tokens, sum_of_axes, tile_keys
from relvit.ops.backends.triton.table_products import (
    SPAN,
    add_product,
    load_axis,
    load_row,
    load_tokens,
    run_up,
    store_products,
    sums_of_entries,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def backward_tile(
    grad_query, grad_cols, query, grad, base, mean, queries, slots, inside, key, value, valid, logits,
    products, sums, key_stride, value_stride, axes, top, left, first, height, width, scale, cols,
    value_cols,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_ENTRIES: tl.constexpr, VALUE_ENTRIES: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the gradients of a block of queries and of their column logits, before scaling."""
    tokens, keep = tile_keys(valid, top, left, first, height, width, ROWS, COLS, PADDED)
    k = load_tokens(key, tokens, key_stride, keep, DIM, BLOCK_DIM)
    v = load_tokens(value, tokens, value_stride, keep, VALUE_DIM, BLOCK_VALUE)
    # In a tile of one row of patches, each query has one row logit: subtract it from `base`, the log-sum-exp, instead
    # of adding it to each pair.
    if KEY_ENTRIES and ROWS == 1:
        base -= load_row(logits, queries, axes, inside, top) * scale
        pairs = cols
    elif KEY_ENTRIES:
        rows = load_axis(logits, queries, axes, inside, top, height, -float("inf"), ROWS)
        pairs = sum_of_axes(rows, cols, BLOCK_M, ROWS, COLS)
    else:
        pairs = tl.zeros((BLOCK_M, ROWS * COLS), tl.float32)
    pairs = add_product(pairs, query, k.trans(), PRECISION)
    if PADDED or not KEY_ENTRIES:
        pairs = tl.where(keep[None, :], pairs, -float("inf"))
    weights = tl.exp2(pairs * scale - base[:, None])
    if ROWS == 1:
        grad_weights = value_cols if VALUE_ENTRIES else tl.zeros((BLOCK_M, COLS), tl.float32)
        if VALUE_ENTRIES:
            mean -= load_row(products, queries, axes, inside, top)
        grad_pairs = weights * (add_product(grad_weights, grad, v.trans(), PRECISION) - mean[:, None])
    else:
        if VALUE_ENTRIES:
            rows = load_axis(products, queries, axes, inside, top, height, 0.0, ROWS)
            # Subtract D from the numbers per row of patches. Subtracting D from the numbers per column would give the
            # same result, but most tiles have fewer rows than columns.
            grad_weights = sum_of_axes(rows - mean[:, None], value_cols, BLOCK_M, ROWS, COLS)
        else:
            grad_weights = tl.zeros((BLOCK_M, ROWS * COLS), tl.float32) - mean[:, None]
        grad_pairs = weights * add_product(grad_weights, grad, v.trans(), PRECISION)
    if KEY_ENTRIES:
        if ROWS == 1:
            grad_cols += grad_pairs
            row_sums = tl.sum(grad_pairs, 1)[:, None]
        else:
            by_axis = grad_pairs.reshape(BLOCK_M, ROWS, COLS)
            grad_cols += tl.sum(by_axis, 1)
            row_sums = tl.sum(by_axis, 2)
        place = top + tl.arange(0, ROWS)
        pointers = sums + slots[:, None] * axes + place[None, :]
        stored = inside[:, None] & (place < height)[None, :]
        if STRIPS:
            row_sums += tl.load(pointers, mask=stored & (left > 0), other=0.0)
        tl.store(pointers, row_sums, mask=stored)
    return add_product(grad_query, grad_pairs.to(k.dtype), k, PRECISION), grad_cols


@triton.jit
def backward_queries(
    query, key, value, position, valid, key_table, bias, value_table, key_index, key_bounds, value_index, value_bounds,
    grad, out, grad_query, grad_position, lse, means, logits, products, entries, sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, p_batch, p_head, p_token,
    valid_batch, g_batch, g_head, g_token, o_batch, o_head, o_token, gq_batch, gq_head, gq_token, gp_batch, gp_head,
    gp_token, work, heads, length, batched, prefix, height, width, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    POSITION_DIM: tl.constexpr, BLOCK_POSITION: tl.constexpr, KEY_ENTRIES: tl.constexpr, VALUE_ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    POSITION: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of blocks of BLOCK_M queries, head by head, and of their products with the key table.

    The axes of tensors are as in `forward`: `grad` and `out` have the axes of the result of `forward`, and
    `grad_position` has the axes of `position`. `entries`, (B, Nq, heads, KEY_ENTRIES), are the gradients of the
    products with the key table. This kernel stores numbers that `backward_keys` reads: in `means`, (B, heads, Nq), the
    dot product of each query's result and its gradient; in `logits` and `products`, (B, heads, Nq, H + W) each, the
    relative logit of each query for each row and column of the key grid, and the product of `grad` with the vector of
    the value table for each row and column.
    `sums`, (BLOCK_M, H + W) float32, is the workspace of one Triton program.
    """
    axes = height + width
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0), disable_licm=True):
        batch, head, pair, queries, slots = place_of(item, heads, length, BLOCK_M)
        inside = queries < length
        keys = key + batch * k_batch + head * k_head
        values = value + batch * v_batch + head * v_head
        mask = valid + batch * valid_batch
        do = load_tokens(grad + batch * g_batch + head * g_head, queries, g_token, inside, VALUE_DIM, BLOCK_VALUE)
        o = load_tokens(out + batch * o_batch + head * o_head, queries, o_token, inside, VALUE_DIM, BLOCK_VALUE)
        mean = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(means + pair * length + queries, mean, mask=inside)
        q = load_tokens(query + batch * q_batch + head * q_head, queries, q_token, inside, DIM, BLOCK_DIM)
        base = tl.load(lse + pair * length + queries, mask=inside, other=float("inf"))
        # `of_key` and `of_value` point to where the kernel stores, for each row and column of the key grid, the logits
        # and the products with value tables.
        of_key, of_value = logits + pair * length * axes, products + pair * length * axes
        index_of_key = key_index + batch * batched * length * axes
        index_of_value = value_index + batch * batched * length * axes
        table = key_table + head * KEY_ENTRIES * POSITION_DIM
        p = q
        if POSITION == "own":
            at = position + batch * p_batch + head * p_head
            p = load_tokens(at, queries, p_token, inside, POSITION_DIM, BLOCK_POSITION)
        if KEY_ENTRIES:
            store_products(
                of_key, queries, inside, p, table, bias + head * KEY_ENTRIES, index_of_key, queries, axes,
                POSITION_DIM, BLOCK_POSITION, KEY_ENTRIES, BLOCK_M, POSITION != "", BIAS, PRECISION,
            )  # fmt: skip
        if VALUE_ENTRIES:
            store_products(
                of_value, queries, inside, do, value_table + head * VALUE_ENTRIES * VALUE_DIM, bias, index_of_value,
                queries, axes, VALUE_DIM, BLOCK_VALUE, VALUE_ENTRIES, BLOCK_M, True, False, PRECISION,
            )  # fmt: skip

        total = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
        cols = tl.zeros((BLOCK_M, COLS), tl.float32)
        value_cols = cols
        for start in range(0, prefix, ROWS * COLS):
            total, _ = backward_tile(
                total, cols, q, do, base, mean, queries, slots, inside, keys, values, mask, of_key,
                of_value, sums, k_token, v_token, axes, start, 0, 0, prefix, 1, scale, cols, cols, DIM,
                BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, BLOCK_M, ROWS * COLS, 1, 0, 0, PADDED, STRIPS, PRECISION,
            )  # fmt: skip
        for left in range(0, width, COLS):
            if KEY_ENTRIES:
                cols = load_axis(of_key + height, queries, axes, inside, left, width, -float("inf"), COLS)
            if VALUE_ENTRIES:
                value_cols = load_axis(of_value + height, queries, axes, inside, left, width, 0.0, COLS)
            grad_cols = tl.zeros((BLOCK_M, COLS), tl.float32)
            for top in range(0, height, ROWS):
                total, grad_cols = backward_tile(
                    total, grad_cols, q, do, base, mean, queries, slots, inside, keys, values, mask, of_key,
                    of_value, sums, k_token, v_token, axes, top, left, prefix, height,
                    width, scale, cols, value_cols, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, BLOCK_M, ROWS, COLS,
                    KEY_ENTRIES, VALUE_ENTRIES, PADDED, STRIPS, PRECISION,
                )  # fmt: skip
            if KEY_ENTRIES:
                place = left + tl.arange(0, COLS)
                pointers = sums + slots[:, None] * axes + (height + place)[None, :]
                tl.store(pointers, grad_cols, mask=inside[:, None] & (place < width)[None, :])
                # The next strip of columns reads sums that other threads of this Triton program have stored, so wait
                # for all threads.
                tl.debug_barrier()

        total *= scale * LN_2
        own = tl.zeros((BLOCK_M, BLOCK_POSITION), tl.float32)
        if KEY_ENTRIES:
            run_up(sums, slots, axes, inside, base, q.dtype, False, BLOCK_M, PRECISION)
            bounds = key_bounds + batch * batched * length * (KEY_ENTRIES + 1)
            # Registers are scarce here, so fewer entries are summed at a time than in `forward`.
            for start in range(0, KEY_ENTRIES, SPAN):
                place = start + tl.arange(0, SPAN)
                keep = place < KEY_ENTRIES
                of_entries = sums_of_entries(sums, bounds, slots, queries, axes, inside, place, KEY_ENTRIES)
                of_entries = (of_entries * (scale * LN_2)).to(q.dtype)
                stored = inside[:, None] & keep[None, :]
                store_entries(entries, of_entries, batch, head, queries, place, heads, length, stored, KEY_ENTRIES)
                if POSITION != "":
                    rows = load_tokens(table, place, POSITION_DIM, keep, POSITION_DIM, BLOCK_POSITION)
                    if POSITION == "own":
                        own = add_product(own, of_entries, rows, PRECISION)
                    else:
                        total = add_product(total, of_entries, rows, PRECISION)
        if POSITION == "own":
            at = grad_position + batch * gp_batch + head * gp_head
            store_tokens(at, queries, gp_token, inside, own, POSITION_DIM, BLOCK_POSITION)
        at = grad_query + batch * gq_batch + head * gq_head
        store_tokens(at, queries, gq_token, inside, total, DIM, BLOCK_DIM)
        # The next block of queries overwrites sums that other threads may still read, so wait for all threads.
        tl.debug_barrier()


@triton.jit
def backward_keys(
    query, key, value, position, valid, key_table, bias, value_table, key_index, key_bounds, value_index, value_bounds,
    grad, grad_key, grad_value, lse, means, logits, products,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, p_batch, p_head, p_token,
    valid_batch, g_batch, g_head, g_token, gk_batch, gk_head, gk_token, gv_batch, gv_head, gv_token,
    work, heads, length, batched, first, height, width, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    POSITION_DIM: tl.constexpr, BLOCK_POSITION: tl.constexpr, KEY_ENTRIES: tl.constexpr, VALUE_ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    POSITION: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of ROWS by COLS keys of one head.

    The axes of tensors are as in `backward_queries`; `first` is the number of the token in the grid's upper left
    corner. Keys are along the first axis of all products, so that the next product takes the weights without a
    transpose.
    """
    strips, axes = tl.cdiv(width, COLS), height + width
    tiles = tl.cdiv(height, ROWS) * strips
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    before = pair.to(tl.int64) * length
    top, left = tile // strips * ROWS, tile % strips * COLS
    query += batch * q_batch + head * q_head
    grad += batch * g_batch + head * g_head
    valid += batch * valid_batch
    logits += before * axes
    products += before * axes
    tokens, keep = tile_keys(valid, top, left, first, height, width, ROWS, COLS, PADDED)
    k = load_tokens(key + batch * k_batch + head * k_head, tokens, k_token, keep, DIM, BLOCK_DIM)
    v = load_tokens(value + batch * v_batch + head * v_head, tokens, v_token, keep, VALUE_DIM, BLOCK_VALUE)

    grad_k = tl.zeros((ROWS * COLS, BLOCK_DIM), tl.float32)
    grad_v = tl.zeros((ROWS * COLS, BLOCK_VALUE), tl.float32)
    for start in range(0, length, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        inside = queries < length
        q = load_tokens(query, queries, q_token, inside, DIM, BLOCK_DIM)
        # Beyond the last query the log-sum-exp is set to infinity, so that the weights there are zero.
        base = tl.load(lse + before + queries, mask=inside, other=float("inf"))
        mean = tl.load(means + before + queries, mask=inside, other=0.0)
        if KEY_ENTRIES:
            cols = load_axis(logits + height, queries, axes, inside, left, width, -float("inf"), COLS)
            if ROWS == 1:
                base -= load_row(logits, queries, axes, inside, top) * scale
                pairs = cols.trans()
            else:
                rows = load_axis(logits, queries, axes, inside, top, height, -float("inf"), ROWS)
                pairs = sum_of_axes_transposed(rows, cols, BLOCK_M, ROWS, COLS)
        else:
            pairs = tl.zeros((ROWS * COLS, BLOCK_M), tl.float32)
        pairs = add_product(pairs, k, q.trans(), PRECISION)
        if PADDED or not KEY_ENTRIES:
            pairs = tl.where(keep[:, None], pairs, -float("inf"))
        weights = tl.exp2(pairs * scale - base[None, :])
        do = load_tokens(grad, queries, g_token, inside, VALUE_DIM, BLOCK_VALUE)
        grad_v = add_product(grad_v, weights.to(do.dtype), do, PRECISION)
        if VALUE_ENTRIES:
            cols = load_axis(products + height, queries, axes, inside, left, width, 0.0, COLS)
        if ROWS == 1:
            grad_weights = cols.trans() if VALUE_ENTRIES else tl.zeros((COLS, BLOCK_M), tl.float32)
            if VALUE_ENTRIES:
                mean -= load_row(products, queries, axes, inside, top)
            grad_pairs = weights * (add_product(grad_weights, v, do.trans(), PRECISION) - mean[None, :])
        else:
            if VALUE_ENTRIES:
                rows = load_axis(products, queries, axes, inside, top, height, 0.0, ROWS)
                grad_weights = sum_of_axes_transposed(rows - mean[:, None], cols, BLOCK_M, ROWS, COLS)
            else:
                grad_weights = tl.zeros((ROWS * COLS, BLOCK_M), tl.float32) - mean[None, :]
            grad_pairs = weights * add_product(grad_weights, v, do.trans(), PRECISION)
        grad_k = add_product(grad_k, grad_pairs.to(q.dtype), q, PRECISION)
    grad_k *= scale * LN_2
    # Store the gradients of padding, too, because the memory for gradients is uninitialised. These gradients are zero,
    # since the attention weights of padding are zero.
    y, x = top + tl.arange(0, ROWS * COLS) // COLS, left + tl.arange(0, ROWS * COLS) % COLS
    exists = (y < height) & (x < width)
    store_tokens(grad_key + batch * gk_batch + head * gk_head, tokens, gk_token, exists, grad_k, DIM, BLOCK_DIM)
    store_tokens(grad_value + batch * gv_batch + head * gv_head, tokens, gv_token, exists, grad_v, VALUE_DIM,
                 BLOCK_VALUE)  # fmt: skip


@triton.jit
def sum_of_axes_transposed(rows, cols, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add up a query's numbers of the row and the column of each key, (ROWS COLS, BLOCK_M)."""
    return (rows.trans()[:, None, :] + cols.trans()[None, :, :]).reshape(ROWS * COLS, BLOCK_M)
