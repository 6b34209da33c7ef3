"""The forward kernel in Triton: relative attention without augmented queries, keys and values.

A key tile has ROWS rows and COLS columns of patches, so a tile's relative logits are ROWS plus COLS numbers per query.
The value tables are multiplied by the marginals, the sums of a query's weights over each row and each column of keys: a
tile adds the sums of its weights along its two axes to the marginals. The kernel goes from one strip of columns to the
next, so that the column logits and marginals of a strip stay in registers. The softmax is computed as in
FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1).

In a tile of one row of patches each query has a single row logit. The query's row marginal is the sum of all weights in
the tile, which the softmax needs anyway, and the weights themselves are added to the column marginals. So such a tile
needs no further sums.

The tiles of prefix keys come first. These tiles have no relative terms, because prefix tokens have no row and no
column.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.table_products import (
    CHUNK,
    add_product,
    load_axis,
    load_row,
    load_tokens,
    run_up,
    store_products,
    sums_of_entries,
)


@triton.jit
def store_tokens(pointer, tokens, stride, keep, vectors, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store the vectors of some tokens."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    tl.store(pointers, vectors.to(pointer.dtype.element_ty), mask=keep[:, None] & (dims < DIM)[None, :])


@triton.jit
def tile_keys(valid, top, left, first, height, width, ROWS: tl.constexpr, COLS: tl.constexpr, PADDED: tl.constexpr):
    """Return which tokens a tile's keys are, and which of them exist and are not padding, (ROWS COLS,) each."""
    place = tl.arange(0, ROWS * COLS)
    y, x = top + place // COLS, left + place % COLS
    tokens, keep = first + y * width + x, (y < height) & (x < width)
    if PADDED:
        keep = keep & (tl.load(valid + tokens, mask=keep, other=0) != 0)
    return tokens, keep


@triton.jit
def sum_of_axes(rows, cols, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add up a query's numbers of the row and the column of each key, (BLOCK_M, ROWS COLS)."""
    return (rows[:, :, None] + cols[:, None, :]).reshape(BLOCK_M, ROWS * COLS)


@triton.jit
def log2(number, PRECISION: tl.constexpr):
    """Compute the logarithm in base 2 by one instruction, exact to 22 bits after the point."""
    if PRECISION == "interpreted":
        return tl.log2(number)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def place_of(item, heads, length, BLOCK_M: tl.constexpr):
    """Return sample, head, their joint index, the queries of a block and the queries' slots in the workspace."""
    blocks = tl.cdiv(length, BLOCK_M)
    pair, block = (item // blocks).to(tl.int64), tl.arange(0, BLOCK_M)
    slots = tl.program_id(0) * BLOCK_M + block
    return pair // heads, pair % heads, pair, item % blocks * BLOCK_M + block, slots


@triton.jit
def store_entries(pointer, numbers, batch, head, queries, place, heads, length, keep, ENTRIES: tl.constexpr):
    """Store numbers by table entry into (B, Nq, heads, ENTRIES)."""
    tokens = (batch * length + queries) * heads + head
    tl.store(pointer + tokens[:, None] * ENTRIES + place[None, :], numbers, mask=keep)


@triton.jit
def forward_tile(
    content, query, slots, inside, key, value, valid, logits, sums, key_stride, value_stride,
    axes, top, left, first, height, width, scale, cols,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_ENTRIES: tl.constexpr, VALUE_TERM: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys: update `content`, (result, maximum, total, column sums), scaled by 2^-maximum."""
    result, maximum, total, col_sums = content
    tokens, keep = tile_keys(valid, top, left, first, height, width, ROWS, COLS, PADDED)
    k = load_tokens(key, tokens, key_stride, keep, DIM, BLOCK_DIM)
    if KEY_ENTRIES and ROWS == 1:
        pairs = cols
    elif KEY_ENTRIES:
        rows = load_axis(logits, slots, axes, inside, top, height, -float("inf"), ROWS)
        pairs = sum_of_axes(rows, cols, BLOCK_M, ROWS, COLS)
    else:
        pairs = tl.zeros((BLOCK_M, ROWS * COLS), tl.float32)
    pairs = add_product(pairs, query, k.trans(), PRECISION)
    # With a key table, keys in rows and columns beyond the grid already have the logit minus infinity, so mask keys
    # only if there is no such table, or for padding.
    if PADDED or not KEY_ENTRIES:
        pairs = tl.where(keep[None, :], pairs, -float("inf"))
    largest = tl.max(pairs, 1)
    if KEY_ENTRIES and ROWS == 1:
        # In a tile of one row of patches, each query has one row logit: add it to the maximum instead of to each pair.
        row = load_row(logits, slots, axes, inside, top)
        largest += row
    new_maximum = tl.maximum(maximum, largest * scale)
    # For queries that have met no key so far, the maximum is minus infinity. Subtract 0 instead, to avoid NaN.
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    decay = tl.exp2(maximum - finite)
    base = finite
    if KEY_ENTRIES and ROWS == 1:
        base -= row * scale
    weights = tl.exp2(pairs * scale - base[:, None])
    if VALUE_TERM:
        if ROWS == 1:
            row_sums = tl.sum(weights, 1)[:, None]
            col_sums = col_sums * decay[:, None] + weights
        else:
            by_axis = weights.reshape(BLOCK_M, ROWS, COLS)
            row_sums = tl.sum(by_axis, 2)
            col_sums = col_sums * decay[:, None] + tl.sum(by_axis, 1)
        # `forward` adds the column sums to the total once for each strip of columns, so do not add this tile's weights
        # here.
        total = total * decay
        # Store logarithms of sums, because a sum scaled by 2^-maximum would be wrong after the maximum grows. The
        # strips to the left have already stored their sums for these rows of the grid: add them.
        place = top + tl.arange(0, ROWS)
        pointers = sums + slots[:, None] * axes + place[None, :]
        stored = inside[:, None] & (place < height)[None, :]
        if STRIPS:
            before = tl.load(pointers, mask=stored & (left > 0), other=-float("inf"))
            row_sums += tl.exp2(before - finite[:, None])
        tl.store(pointers, log2(row_sums, PRECISION) + finite[:, None], mask=stored)
    else:
        total = total * decay + tl.sum(weights, 1)
    v = load_tokens(value, tokens, value_stride, keep, VALUE_DIM, BLOCK_VALUE)
    result = add_product(result * decay[:, None], weights.to(v.dtype), v, PRECISION)
    return result, new_maximum, total, col_sums


@triton.jit
def forward(
    query, key, value, position, valid, key_table, bias, value_table, key_index, key_bounds, value_index, value_bounds,
    out, lse, entries, logits, sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, p_batch, p_head, p_token,
    valid_batch, o_batch, o_head, o_token, work, heads, length, batched, prefix, height, width, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    POSITION_DIM: tl.constexpr, BLOCK_POSITION: tl.constexpr, KEY_ENTRIES: tl.constexpr, VALUE_ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    POSITION: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of blocks of BLOCK_M queries, head by head, and the log-sum-exp of their logits, in base 2.

    `scale` is the scale of attention times log2(e), because the kernel computes powers of 2. A query without keys gets
    zeros as its result, and +inf as its log-sum-exp, so that backward computes weights of zero. The tensors are:

    - query: (B, heads, Nq, DIM), key and value likewise with Nk tokens, all with the last stride 1
    - position: as query; if it is given, the key table is multiplied by position instead of query
    - valid: (B, Nk) bytes
    - tables: (heads, entries, DIM), and bias: (heads, entries)
    - indices: (B or 1, Nq, H + W), and bounds: (B or 1, Nq, entries + 1); `batched` says whether the first axis is B
    - lse: (B, heads, Nq) float32
    - entries: (B, Nq, heads, VALUE_ENTRIES), the attention by entry, which is stored with SAVE
    - logits, sums: (BLOCK_M, H + W) float32, rows before columns, the workspace of each Triton program
    """
    axes = height + width
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0), disable_licm=True):
        batch, head, pair, queries, slots = place_of(item, heads, length, BLOCK_M)

        inside = queries < length
        keys = key + batch * k_batch + head * k_head
        values = value + batch * v_batch + head * v_head
        mask = valid + batch * valid_batch
        index = key_index + batch * batched * length * axes
        q = load_tokens(query + batch * q_batch + head * q_head, queries, q_token, inside, DIM, BLOCK_DIM)
        if KEY_ENTRIES:
            p = q
            if POSITION == "own":
                at = position + batch * p_batch + head * p_head
                p = load_tokens(at, queries, p_token, inside, POSITION_DIM, BLOCK_POSITION)
            store_products(
                logits, slots, inside, p, key_table + head * KEY_ENTRIES * POSITION_DIM, bias + head * KEY_ENTRIES,
                index, queries, axes, POSITION_DIM, BLOCK_POSITION, KEY_ENTRIES, BLOCK_M, POSITION != "", BIAS,
                PRECISION,
            )  # fmt: skip

        result = tl.zeros((BLOCK_M, BLOCK_VALUE), tl.float32)
        maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        cols = tl.zeros((BLOCK_M, COLS), tl.float32)
        for start in range(0, prefix, ROWS * COLS):
            result, maximum, total, _ = forward_tile(
                (result, maximum, total, cols), q, slots, inside, keys, values, mask, logits, sums,
                k_token, v_token, axes, start, 0, 0, prefix, 1, scale, cols, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE,
                BLOCK_M, ROWS * COLS, 1, 0, False, PADDED, STRIPS, PRECISION,
            )  # fmt: skip
        for left in range(0, width, COLS):
            if KEY_ENTRIES:
                cols = load_axis(logits + height, slots, axes, inside, left, width, -float("inf"), COLS)
            col_sums = tl.zeros((BLOCK_M, COLS), tl.float32)
            for top in range(0, height, ROWS):
                result, maximum, total, col_sums = forward_tile(
                    (result, maximum, total, col_sums), q, slots, inside, keys, values, mask, logits,
                    sums, k_token, v_token, axes, top, left, prefix, height, width, scale, cols, DIM, BLOCK_DIM,
                    VALUE_DIM, BLOCK_VALUE, BLOCK_M, ROWS, COLS, KEY_ENTRIES, VALUE_ENTRIES > 0, PADDED, STRIPS,
                    PRECISION,
                )  # fmt: skip
            if VALUE_ENTRIES:
                total += tl.sum(col_sums, 1)
                finite = tl.where(maximum == -float("inf"), 0.0, maximum)
                place = left + tl.arange(0, COLS)
                pointers = sums + slots[:, None] * axes + (height + place)[None, :]
                stored = inside[:, None] & (place < width)[None, :]
                tl.store(pointers, log2(col_sums, PRECISION) + finite[:, None], mask=stored)
                # The next strip of columns reads sums that other threads of this Triton program have stored, so wait
                # for all threads.
                tl.debug_barrier()

        base = tl.where(total > 0, maximum + tl.log2(total), float("inf"))
        tl.store(lse + pair * length + queries, base, mask=inside)
        result *= (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        if VALUE_ENTRIES:
            run_up(sums, slots, axes, inside, base, q.dtype, True, BLOCK_M, PRECISION)
            bounds = value_bounds + batch * batched * length * (VALUE_ENTRIES + 1)
            for start in range(0, VALUE_ENTRIES, CHUNK):
                place = start + tl.arange(0, CHUNK)
                keep = place < VALUE_ENTRIES
                table = value_table + head * VALUE_ENTRIES * VALUE_DIM
                rows = load_tokens(table, place, VALUE_DIM, keep, VALUE_DIM, BLOCK_VALUE)
                of_entries = sums_of_entries(sums, bounds, slots, queries, axes, inside, place, VALUE_ENTRIES)
                of_entries = of_entries.to(rows.dtype)
                result = add_product(result, of_entries, rows, PRECISION)
                if SAVE:
                    stored = inside[:, None] & keep[None, :]
                    store_entries(
                        entries, of_entries, batch, head, queries, place, heads, length, stored, VALUE_ENTRIES
                    )
        store_tokens(out + batch * o_batch + head * o_head, queries, o_token, inside, result, VALUE_DIM, BLOCK_VALUE)
        # The next block of queries overwrites numbers that other threads may still read, so wait for all threads.
        tl.debug_barrier()
