"""The backward kernels in Triton: one over query tiles, one over key tiles, so that no sum needs atomics.

As in FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.2) weights are recomputed from the log-sum-exp, and
dS = P (dP - D). Here dP is the product of the result's gradient with the values plus the marginals' gradients of the
key's row and column; the gradients of row and column logits are sums of dS along either axis of a tile. D, the sum of
P dP over keys, comes from PyTorch.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.forward import (
    add_product,
    load_axis,
    load_tokens,
    store_tokens,
    sum_of_axes,
    tile_keys,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def backward_tile(
    grad_query, grad_cols, query, grad, base, mean, queries, inside, key, value, logits, valid, grad_marginals,
    grad_logits, key_stride, value_stride, logits_stride, marginals_stride, grad_stride, top, left, first, height,
    width, scale, cols, marginal_cols,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_TERM: tl.constexpr, VALUE_TERM: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the gradients of a block of queries and of their column logits, but for the scale."""
    tokens, keep = tile_keys(valid, top, left, first, height, width, ROWS, COLS, PADDED)
    k = load_tokens(key, tokens, key_stride, keep, DIM, BLOCK_DIM)
    v = load_tokens(value, tokens, value_stride, keep, VALUE_DIM, BLOCK_VALUE)
    if KEY_TERM:
        rows = load_axis(logits, queries, logits_stride, inside, top, height, -float("inf"), ROWS)
        pairs = sum_of_axes(rows, cols, BLOCK_M, ROWS, COLS)
    else:
        pairs = tl.zeros((BLOCK_M, ROWS * COLS), tl.float32)
    pairs = add_product(pairs, query, k.trans(), PRECISION)
    if PADDED or not KEY_TERM:
        pairs = tl.where(keep[None, :], pairs, -float("inf"))
    weights = tl.exp2(pairs * scale - base[:, None])
    if VALUE_TERM:
        rows = load_axis(grad_marginals, queries, marginals_stride, inside, top, height, 0.0, ROWS)
        # D may be subtracted from either axis: from the shorter one it is in fewer instructions.
        grad_weights = sum_of_axes(rows - mean[:, None], marginal_cols, BLOCK_M, ROWS, COLS)
    else:
        grad_weights = tl.zeros((BLOCK_M, ROWS * COLS), tl.float32) - mean[:, None]
    grad_pairs = weights * add_product(grad_weights, grad, v.trans(), PRECISION)
    if KEY_TERM:
        by_axis = grad_pairs.reshape(BLOCK_M, ROWS, COLS)
        grad_cols += tl.sum(by_axis, 1)
        place = top + tl.arange(0, ROWS)
        pointers = grad_logits + queries[:, None] * grad_stride + place[None, :]
        stored = inside[:, None] & (place < height)[None, :]
        row_sums = tl.sum(by_axis, 2) * (scale * LN_2)
        if STRIPS:
            row_sums += tl.load(pointers, mask=stored & (left > 0), other=0.0)
        tl.store(pointers, row_sums, mask=stored)
    return add_product(grad_query, grad_pairs.to(k.dtype), k, PRECISION), grad_cols


@triton.jit
def backward_queries(
    query, key, value, logits, valid, grad, grad_marginals, lse, means, grad_query, grad_logits,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, l_batch, l_head, l_token,
    valid_batch, o_batch, o_head, o_token, m_batch, m_head, m_token, gq_batch, gq_head, gq_token, gl_batch, gl_head,
    gl_token, heads, length, prefix, height, width, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_TERM: tl.constexpr, VALUE_TERM: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_M queries of one head and of their row and column logits.

    Axes as in `forward`; grad as its result, grad_marginals as its marginals, means as its log-sum-exp, grad_logits
    float32 as its logits.
    """
    blocks = tl.cdiv(length, BLOCK_M)
    pair = tl.program_id(0) // blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    queries = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = queries < length
    key += batch * k_batch + head * k_head
    value += batch * v_batch + head * v_head
    logits += batch * l_batch + head * l_head
    grad_marginals += batch * m_batch + head * m_head
    grad_logits += batch * gl_batch + head * gl_head
    valid += batch * valid_batch
    q = load_tokens(query + batch * q_batch + head * q_head, queries, q_token, inside, DIM, BLOCK_DIM)
    do = load_tokens(grad + batch * o_batch + head * o_head, queries, o_token, inside, VALUE_DIM, BLOCK_VALUE)
    base = tl.load(lse + pair.to(tl.int64) * length + queries, mask=inside, other=float("inf"))
    mean = tl.load(means + pair.to(tl.int64) * length + queries, mask=inside, other=0.0)

    total = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    cols = tl.zeros((BLOCK_M, COLS), tl.float32)
    marginal_cols = cols
    for start in range(0, prefix, ROWS * COLS):
        total, _ = backward_tile(
            total, cols, q, do, base, mean, queries, inside, key, value, logits, valid, grad_marginals, grad_logits,
            k_token, v_token, l_token, m_token, gl_token, start, 0, 0, prefix, 1, scale, cols, cols, DIM, BLOCK_DIM,
            VALUE_DIM, BLOCK_VALUE, BLOCK_M, ROWS * COLS, 1, False, False, PADDED, STRIPS, PRECISION,
        )  # fmt: skip
    for left in range(0, width, COLS):
        if KEY_TERM:
            cols = load_axis(logits + height, queries, l_token, inside, left, width, -float("inf"), COLS)
        if VALUE_TERM:
            marginal_cols = load_axis(grad_marginals + height, queries, m_token, inside, left, width, 0.0, COLS)
        grad_cols = tl.zeros((BLOCK_M, COLS), tl.float32)
        for top in range(0, height, ROWS):
            total, grad_cols = backward_tile(
                total, grad_cols, q, do, base, mean, queries, inside, key, value, logits, valid, grad_marginals,
                grad_logits, k_token, v_token, l_token, m_token, gl_token, top, left, prefix, height, width, scale,
                cols, marginal_cols, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, BLOCK_M, ROWS, COLS, KEY_TERM, VALUE_TERM,
                PADDED, STRIPS, PRECISION,
            )  # fmt: skip
        if KEY_TERM:
            place = left + tl.arange(0, COLS)
            pointers = grad_logits + queries[:, None] * gl_token + (height + place)[None, :]
            tl.store(pointers, grad_cols * (scale * LN_2), mask=inside[:, None] & (place < width)[None, :])
            # The next strip reads what other threads of this program have stored.
            tl.debug_barrier()
    total *= scale * LN_2
    store_tokens(grad_query + batch * gq_batch + head * gq_head, queries, gq_token, inside, total, DIM, BLOCK_DIM)


@triton.jit
def backward_keys(
    query, key, value, logits, valid, grad, grad_marginals, lse, means, grad_key, grad_value,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, l_batch, l_head, l_token,
    valid_batch, o_batch, o_head, o_token, m_batch, m_head, m_token, gk_batch, gk_head, gk_token, gv_batch, gv_head,
    gv_token, heads, length, first, height, width, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    KEY_TERM: tl.constexpr, VALUE_TERM: tl.constexpr, PADDED: tl.constexpr, STRIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of ROWS by COLS keys of one head.

    Axes as in `backward_queries`; `first` is the token in the grid's corner. Keys are along the first axis of all
    products, so that weights are an operand of the next product as they come.
    """
    strips = tl.cdiv(width, COLS)
    tiles = tl.cdiv(height, ROWS) * strips
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    top, left = tile // strips * ROWS, tile % strips * COLS
    query += batch * q_batch + head * q_head
    grad += batch * o_batch + head * o_head
    logits += batch * l_batch + head * l_head
    grad_marginals += batch * m_batch + head * m_head
    valid += batch * valid_batch
    lse += pair.to(tl.int64) * length
    means += pair.to(tl.int64) * length
    tokens, keep = tile_keys(valid, top, left, first, height, width, ROWS, COLS, PADDED)
    k = load_tokens(key + batch * k_batch + head * k_head, tokens, k_token, keep, DIM, BLOCK_DIM)
    v = load_tokens(value + batch * v_batch + head * v_head, tokens, v_token, keep, VALUE_DIM, BLOCK_VALUE)

    grad_k = tl.zeros((ROWS * COLS, BLOCK_DIM), tl.float32)
    grad_v = tl.zeros((ROWS * COLS, BLOCK_VALUE), tl.float32)
    for start in range(0, length, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        inside = queries < length
        q = load_tokens(query, queries, q_token, inside, DIM, BLOCK_DIM)
        if KEY_TERM:
            rows = load_axis(logits, queries, l_token, inside, top, height, -float("inf"), ROWS)
            cols = load_axis(logits + height, queries, l_token, inside, left, width, -float("inf"), COLS)
            pairs = sum_of_axes_transposed(rows, cols, BLOCK_M, ROWS, COLS)
        else:
            pairs = tl.zeros((ROWS * COLS, BLOCK_M), tl.float32)
        pairs = add_product(pairs, k, q.trans(), PRECISION)
        if PADDED or not KEY_TERM:
            pairs = tl.where(keep[:, None], pairs, -float("inf"))
        # Infinite behind the last query: its weights are zero.
        base = tl.load(lse + queries, mask=inside, other=float("inf"))
        weights = tl.exp2(pairs * scale - base[None, :])
        do = load_tokens(grad, queries, o_token, inside, VALUE_DIM, BLOCK_VALUE)
        grad_v = add_product(grad_v, weights.to(do.dtype), do, PRECISION)
        mean = tl.load(means + queries, mask=inside, other=0.0)
        if VALUE_TERM:
            rows = load_axis(grad_marginals, queries, m_token, inside, top, height, 0.0, ROWS)
            cols = load_axis(grad_marginals + height, queries, m_token, inside, left, width, 0.0, COLS)
            grad_weights = sum_of_axes_transposed(rows - mean[:, None], cols, BLOCK_M, ROWS, COLS)
        else:
            grad_weights = tl.zeros((ROWS * COLS, BLOCK_M), tl.float32) - mean[None, :]
        grad_pairs = weights * add_product(grad_weights, v, do.trans(), PRECISION)
        grad_k = add_product(grad_k, grad_pairs.to(q.dtype), q, PRECISION)
    grad_k *= scale * LN_2
    # Padding gets zeros: of it all weights are zero.
    y, x = top + tl.arange(0, ROWS * COLS) // COLS, left + tl.arange(0, ROWS * COLS) % COLS
    exists = (y < height) & (x < width)
    store_tokens(grad_key + batch * gk_batch + head * gk_head, tokens, gk_token, exists, grad_k, DIM, BLOCK_DIM)
    store_tokens(grad_value + batch * gv_batch + head * gv_head, tokens, gv_token, exists, grad_v, VALUE_DIM,
                 BLOCK_VALUE)  # fmt: skip


@triton.jit
def sum_of_axes_transposed(rows, cols, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add up a query's numbers of the row and the column of each key, (ROWS COLS, BLOCK_M)."""
    return (rows.trans()[:, None, :] + cols.trans()[None, :, :]).reshape(ROWS * COLS, BLOCK_M)
