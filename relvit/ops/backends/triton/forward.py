"""The forward kernel in Triton: relative attention in which q, k and v stay as narrow as they are.

A key tile has ROWS image rows by COLS image columns, so a tile's relative logits are ROWS plus COLS numbers per query,
and the tile's part of the row and column marginals are sums of its weights along either axis. Column strip by column
strip, so that the column logits and marginals of a strip stay in registers from one tile to the next. Softmax on the
way as in FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1).

Prefix keys come first, in tiles without terms.
"""

import triton
import triton.language as tl


@triton.jit
def load_tokens(pointer, tokens, stride, keep, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load the vectors of some tokens, (tokens, BLOCK_DIM), zeros for those that are not kept."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    if DIM == BLOCK_DIM:
        return tl.load(pointers, mask=keep[:, None], other=0.0)
    return tl.load(pointers, mask=keep[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_tokens(pointer, tokens, stride, keep, vectors, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store the vectors of some tokens."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    tl.store(pointers, vectors.to(pointer.dtype.element_ty), mask=keep[:, None] & (dims < DIM)[None, :])


@triton.jit
def tile_keys(valid, top, left, first, height, width, ROWS: tl.constexpr, COLS: tl.constexpr, PADDED: tl.constexpr):
    """Return which tokens a tile's keys are, and which of them exist and are no padding, (ROWS COLS,) each."""
    place = tl.arange(0, ROWS * COLS)
    y, x = top + place // COLS, left + place % COLS
    tokens, keep = first + y * width + x, (y < height) & (x < width)
    if PADDED:
        keep = keep & (tl.load(valid + tokens, mask=keep, other=0) != 0)
    return tokens, keep


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """total + left right, for float32 not on matrix units, which would round to ten bits."""
    if PRECISION == "interpreted":
        # To the interpreter bfloat16 is a number's bits.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def load_axis(pointer, queries, stride, inside, first, end, outside, SIZE: tl.constexpr):
    """Load what queries have for each of SIZE rows, or columns, (queries, SIZE); `outside` for those after `end`."""
    place = first + tl.arange(0, SIZE)
    pointers = pointer + queries[:, None] * stride + place[None, :]
    return tl.load(pointers, mask=inside[:, None] & (place < end)[None, :], other=outside).to(tl.float32)


@triton.jit
def sum_of_axes(rows, cols, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add up a query's numbers of the row and the column of each key, (BLOCK_M, ROWS COLS)."""
    return (rows[:, :, None] + cols[:, None, :]).reshape(BLOCK_M, ROWS * COLS)


@triton.jit
def log2(number, PRECISION: tl.constexpr):
    """Logarithm in one instruction, to 22 bits after the point."""
    if PRECISION == "interpreted":
        return tl.log2(number)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def forward_tile(
    content, query, queries, inside, key, value, logits, valid, sums, key_stride, value_stride, logits_stride,
    sums_stride, top, left, first, height, width, scale, cols,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_TERM: tl.constexpr, VALUE_TERM: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys: `content` is (result, maximum, total, column sums) so far, all but the maximum
    relative to two to the power of the maximum."""
    result, maximum, total, col_sums = content
    tokens, keep = tile_keys(valid, top, left, first, height, width, ROWS, COLS, PADDED)
    k = load_tokens(key, tokens, key_stride, keep, DIM, BLOCK_DIM)
    if KEY_TERM:
        rows = load_axis(logits, queries, logits_stride, inside, top, height, -float("inf"), ROWS)
        pairs = sum_of_axes(rows, cols, BLOCK_M, ROWS, COLS)
    else:
        pairs = tl.zeros((BLOCK_M, ROWS * COLS), tl.float32)
    pairs = add_product(pairs, query, k.trans(), PRECISION)
    # Rows and columns beyond the grid have logits of minus infinity already.
    if PADDED or not KEY_TERM:
        pairs = tl.where(keep[None, :], pairs, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(pairs, 1) * scale)
    # Of queries without any key so far.
    finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    decay = tl.exp2(maximum - finite)
    weights = tl.exp2(pairs * scale - finite[:, None])
    if VALUE_TERM:
        by_axis = weights.reshape(BLOCK_M, ROWS, COLS)
        row_sums = tl.sum(by_axis, 2)
        col_sums = col_sums * decay[:, None] + tl.sum(by_axis, 1)
        total = total * decay + tl.sum(row_sums, 1)
        # By their logarithms, which stay true when the maximum grows; strips to the left have left theirs.
        place = top + tl.arange(0, ROWS)
        pointers = sums + queries[:, None] * sums_stride + place[None, :]
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
    query, key, value, logits, valid, out, marginals, lse,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, l_batch, l_head, l_token,
    valid_batch, o_batch, o_head, o_token, m_batch, m_head, m_token,
    heads, length, prefix, height, width, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_TERM: tl.constexpr, VALUE_TERM: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of BLOCK_M queries of one head, their marginals and their log-sum-exp, all in base 2.

    `scale` is the scale times log2(e). Axes: query (B, heads, Nq, DIM), key and value with Nk tokens, the last stride
    1; logits (B, heads, Nq, H + W); valid (B, Nk) bytes; marginals (B, heads, Nq, H + W) and lse (B, heads, Nq),
    float32. A query without keys gets zeros and the log-sum-exp +inf.
    """
    blocks = tl.cdiv(length, BLOCK_M)
    pair = tl.program_id(0) // blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    queries = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = queries < length
    key += batch * k_batch + head * k_head
    value += batch * v_batch + head * v_head
    logits += batch * l_batch + head * l_head
    marginals += batch * m_batch + head * m_head
    valid += batch * valid_batch
    q = load_tokens(query + batch * q_batch + head * q_head, queries, q_token, inside, DIM, BLOCK_DIM)

    result = tl.zeros((BLOCK_M, BLOCK_VALUE), tl.float32)
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    cols = tl.zeros((BLOCK_M, COLS), tl.float32)
    for start in range(0, prefix, ROWS * COLS):
        result, maximum, total, _ = forward_tile(
            (result, maximum, total, cols), q, queries, inside, key, value, logits, valid, marginals, k_token, v_token,
            l_token, m_token, start, 0, 0, prefix, 1, scale, cols, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE,
            BLOCK_M, ROWS * COLS, 1, False, False, PADDED, STRIPS, PRECISION,
        )  # fmt: skip
    for left in range(0, width, COLS):
        if KEY_TERM:
            cols = load_axis(logits + height, queries, l_token, inside, left, width, -float("inf"), COLS)
        col_sums = tl.zeros((BLOCK_M, COLS), tl.float32)
        for top in range(0, height, ROWS):
            result, maximum, total, col_sums = forward_tile(
                (result, maximum, total, col_sums), q, queries, inside, key, value, logits, valid, marginals, k_token,
                v_token, l_token, m_token, top, left, prefix, height, width, scale, cols, DIM, BLOCK_DIM, VALUE_DIM,
                BLOCK_VALUE, BLOCK_M, ROWS, COLS, KEY_TERM, VALUE_TERM, PADDED, STRIPS, PRECISION,
            )  # fmt: skip
        if VALUE_TERM:
            finite = tl.where(maximum == -float("inf"), 0.0, maximum)
            place = left + tl.arange(0, COLS)
            pointers = marginals + queries[:, None] * m_token + (height + place)[None, :]
            stored = inside[:, None] & (place < width)[None, :]
            tl.store(pointers, log2(col_sums, PRECISION) + finite[:, None], mask=stored)
            # The next strip, and the loop below, read what other threads of this program have stored.
            tl.debug_barrier()

    base = tl.where(total > 0, maximum + tl.log2(total), float("inf"))
    tl.store(lse + pair.to(tl.int64) * length + queries, base, mask=inside)
    if VALUE_TERM:
        for start in range(0, height + width, 16):
            place = start + tl.arange(0, 16)
            pointers = marginals + queries[:, None] * m_token + place[None, :]
            stored = inside[:, None] & (place < height + width)[None, :]
            sums = tl.load(pointers, mask=stored, other=-float("inf"))
            tl.store(pointers, tl.exp2(sums - base[:, None]), mask=stored)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    store_tokens(out + batch * o_batch + head * o_head, queries, o_token, inside, result, VALUE_DIM, BLOCK_VALUE)
