"""The backward kernels in Triton for a joint bias: one over blocks of queries, one over blocks of keys.

As in FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.2) the attention weights P are recomputed from the
log-sum-exp, and the gradient of the logits is P (dP - D), with dP the gradient of the weights and D the dot product of
a query's result and its gradient. The gradient of the table is computed in `table_gradient`.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.backward import LN_2
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
def joint_backward_queries(
    query, key, value, valid, table, query_places, key_places, grad, out, grad_query, lse, means,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token,
    o_batch, o_head, o_token, gq_batch, gq_head, gq_token, valid_batch, heads, length, keys, entries, scale,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_M queries of one head, and D, means (B, heads, Nq), for the other kernels.

    The axes of tensors are as in `joint_forward`; `grad` and `out` have the result's axes, and `grad_query` has the
    axes of `query`.
    """
    batch, head, pair, queries = place_of_block(tl.program_id(0), heads, length, BLOCK_M)
    inside = queries < length
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head * k_head
    value += batch * v_batch + head * v_head
    grad += batch * g_batch + head * g_head
    out += batch * o_batch + head * o_head
    valid += batch * valid_batch
    table += head * entries
    do = load_vectors(grad, queries, g_token, inside, VALUE_DIM, VALUE_MAIN, VALUE_REST)
    o, o_rest = load_vectors(out, queries, o_token, inside, VALUE_DIM, VALUE_MAIN, VALUE_REST)
    mean = tl.sum(do[0].to(tl.float32) * o.to(tl.float32), 1)
    if VALUE_REST:
        mean += tl.sum(do[1].to(tl.float32) * o_rest.to(tl.float32), 1)
    tl.store(means + pair * length + queries, mean, mask=inside)
    q = load_vectors(query, queries, q_token, inside, DIM, MAIN, REST)
    base = tl.load(lse + pair * length + queries, mask=inside, other=float("inf"))
    of_queries = tl.load(query_places + queries)[:, None]

    total = zero_vectors(BLOCK_M, MAIN, REST)
    for start in range(0, keys, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        keep = kept_keys(valid, tokens, keys, PADDED)
        k = load_vectors(key, tokens, k_token, keep, DIM, MAIN, REST)
        v = load_vectors(value, tokens, v_token, keep, VALUE_DIM, VALUE_MAIN, VALUE_REST)
        pairs = pair_bias(table, of_queries, tl.load(key_places + tokens)[None, :], PRECISION)
        pairs = add_products_of(pairs, q, k, REST, PRECISION)
        if PADDED or EDGE:
            pairs = tl.where(keep[None, :], pairs, -float("inf"))
        weights = tl.exp2(pairs * scale - base[:, None])
        grad_weights = add_products_of(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), do, v, VALUE_REST, PRECISION)
        total = add_vectors(total, weights * (grad_weights - mean[:, None]), k, REST, PRECISION)

    grad_query += batch * gq_batch + head * gq_head
    store_vectors(grad_query, queries, gq_token, inside, times(scale * LN_2, total), DIM, MAIN, REST)


@triton.jit
def joint_backward_keys(
    query, key, value, valid, table, query_places, key_places, grad, grad_key, grad_value, lse, means,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token,
    gk_batch, gk_head, gk_token, gv_batch, gv_head, gv_token, valid_batch, heads, length, keys, entries, scale,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_N keys and values of one head.

    The axes of tensors are as in `joint_backward_queries`. Keys are along the first axis of all products, so that the
    next product takes the weights without a transpose.
    """
    batch, head, pair, tokens = place_of_block(tl.program_id(0), heads, keys, BLOCK_N)
    exists = tokens < keys
    keep = kept_keys(valid + batch * valid_batch, tokens, keys, PADDED)
    query += batch * q_batch + head * q_head
    grad += batch * g_batch + head * g_head
    lse += pair * length
    means += pair * length
    table += head * entries
    k = load_vectors(key + batch * k_batch + head * k_head, tokens, k_token, keep, DIM, MAIN, REST)
    values = value + batch * v_batch + head * v_head
    v = load_vectors(values, tokens, v_token, keep, VALUE_DIM, VALUE_MAIN, VALUE_REST)
    of_keys = tl.load(key_places + tokens)[:, None]

    grad_k = zero_vectors(BLOCK_N, MAIN, REST)
    grad_v = zero_vectors(BLOCK_N, VALUE_MAIN, VALUE_REST)
    for start in range(0, length, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        inside = queries < length
        q = load_vectors(query, queries, q_token, inside, DIM, MAIN, REST)
        pairs = pair_bias(table, tl.load(query_places + queries)[None, :], of_keys, PRECISION)
        pairs = add_products_of(pairs, k, q, REST, PRECISION)
        if PADDED or EDGE:
            pairs = tl.where(keep[:, None], pairs, -float("inf"))
        # Beyond the last query the log-sum-exp is set to infinity, so that the weights there are zero.
        base = tl.load(lse + queries, mask=inside, other=float("inf"))
        weights = tl.exp2(pairs * scale - base[None, :])
        do = load_vectors(grad, queries, g_token, inside, VALUE_DIM, VALUE_MAIN, VALUE_REST)
        grad_v = add_vectors(grad_v, weights, do, VALUE_REST, PRECISION)
        mean = tl.load(means + queries, mask=inside, other=0.0)
        grad_weights = add_products_of(tl.zeros((BLOCK_N, BLOCK_M), tl.float32), v, do, VALUE_REST, PRECISION)
        grad_k = add_vectors(grad_k, weights * (grad_weights - mean[None, :]), q, REST, PRECISION)

    # Store the gradients of padding, too, because the memory for gradients is uninitialised. These gradients are zero,
    # since the attention weights of padding are zero.
    grad_key += batch * gk_batch + head * gk_head
    grad_value += batch * gv_batch + head * gv_head
    store_vectors(grad_key, tokens, gk_token, exists, times(scale * LN_2, grad_k), DIM, MAIN, REST)
    store_vectors(grad_value, tokens, gv_token, exists, grad_v, VALUE_DIM, VALUE_MAIN, VALUE_REST)
