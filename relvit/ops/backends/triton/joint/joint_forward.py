"""The forward kernel in Triton for a joint bias, which is looked up for each pair of tokens.

The softmax is computed as in FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1). The bias is divided by the
scale in advance, so that products of queries and keys can be added to it before the scale is applied.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.joint.tiles import (
    add_products_of,
    add_vectors,
    kept_keys,
    load_vectors,
    pair_bias,
    place_of_block,
    store_vectors,
    times,
    zero_vectors,
)


@triton.jit
def joint_forward(
    query, key, value, valid, table, query_places, key_places, out, lse,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    valid_batch, heads, length, keys, entries, scale,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of BLOCK_M queries of one head, and their log-sum-exp in base 2.

    `scale` is the scale of attention times log2(e), because the kernel computes powers of 2. A query without keys gets
    zeros as its result, and +inf as its log-sum-exp, so that backward computes weights of zero. The tensors are:

    - query: (B, heads, Nq, DIM), key and value likewise with Nk tokens, all with the last stride 1
    - valid: (B, Nk) bytes
    - table: (heads, entries) float32
    - query_places, key_places: the `queries` and `keys` of `layout`
    - lse: (B, heads, Nq) float32
    """
    batch, head, pair, queries = place_of_block(tl.program_id(0), heads, length, BLOCK_M)
    inside = queries < length
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head * k_head
    value += batch * v_batch + head * v_head
    valid += batch * valid_batch
    table += head * entries
    q = load_vectors(query, queries, q_token, inside, DIM, MAIN, REST)
    of_queries = tl.load(query_places + queries)[:, None]

    result = zero_vectors(BLOCK_M, VALUE_MAIN, VALUE_REST)
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, keys, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        keep = kept_keys(valid, tokens, keys, PADDED)
        k = load_vectors(key, tokens, k_token, keep, DIM, MAIN, REST)
        pairs = pair_bias(table, of_queries, tl.load(key_places + tokens)[None, :], PRECISION)
        pairs = add_products_of(pairs, q, k, REST, PRECISION)
        if PADDED or EDGE:
            pairs = tl.where(keep[None, :], pairs, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(pairs, 1) * scale)
        # For queries that have met no key so far, the maximum is minus infinity. Subtract 0 instead, to avoid NaN.
        finite = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - finite)
        weights = tl.exp2(pairs * scale - finite[:, None])
        total = total * decay + tl.sum(weights, 1)
        v = load_vectors(value, tokens, v_token, keep, VALUE_DIM, VALUE_MAIN, VALUE_REST)
        result = add_vectors(times(decay[:, None], result), weights, v, VALUE_REST, PRECISION)
        maximum = new_maximum

    base = tl.where(total > 0, maximum + tl.log2(total), float("inf"))
    tl.store(lse + pair * length + queries, base, mask=inside)
    result = times((1.0 / tl.where(total > 0, total, 1.0))[:, None], result)
    out += batch * o_batch + head * o_head
    store_vectors(out, queries, o_token, inside, result, VALUE_DIM, VALUE_MAIN, VALUE_REST)
