"""Functions that the kernels of a joint bias share: vectors in two parts, and the bias of a tile of pairs.

A head of width 80, or a head of width 64 with free channels (`RelativeTerms.channels`), would need tiles of width 128,
because Triton's tiles have powers of two as sizes. With two parts, of width 64 and 16, all products are more than a
third smaller.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.forward import store_tokens
from relvit.ops.backends.triton.table_products import add_product, load_tokens


@triton.jit
def load_vectors(pointer, tokens, stride, keep, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Load the vectors of some tokens, (tokens, MAIN) and (tokens, REST); without a rest the first part twice."""
    if REST:
        main = load_tokens(pointer, tokens, stride, keep, MAIN, MAIN)
        rest = load_tokens(pointer + MAIN, tokens, stride, keep, DIM - MAIN, REST)
    else:
        main = load_tokens(pointer, tokens, stride, keep, DIM, MAIN)
        rest = main
    return main, rest


@triton.jit
def store_vectors(pointer, tokens, stride, keep, vectors, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Store the vectors of some tokens, given in two parts."""
    main, rest = vectors
    if REST:
        store_tokens(pointer, tokens, stride, keep, main, MAIN, MAIN)
        store_tokens(pointer + MAIN, tokens, stride, keep, rest, DIM - MAIN, REST)
    else:
        store_tokens(pointer, tokens, stride, keep, main, DIM, MAIN)


@triton.jit
def add_products_of(total, left, right, REST: tl.constexpr, PRECISION: tl.constexpr):
    """Add the product of each vector on the left with each on the right, both in two parts."""
    # Triton 3.6 refuses nested targets, as in `(a, b), (c, d) = left, right`, so unpack in two steps.
    left, left_rest = left
    right, right_rest = right
    total = add_product(total, left, right.trans(), PRECISION)
    if REST:
        total = add_product(total, left_rest, right_rest.trans(), PRECISION)
    return total


@triton.jit
def add_vectors(total, weights, vectors, REST: tl.constexpr, PRECISION: tl.constexpr):
    """Add vectors times their weights to a total, both in two parts."""
    main, rest = total
    vectors, vectors_rest = vectors
    weights = weights.to(vectors.dtype)
    main = add_product(main, weights, vectors, PRECISION)
    if REST:
        rest = add_product(rest, weights, vectors_rest, PRECISION)
    return main, rest


@triton.jit
def zero_vectors(SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Return zeros for vectors in two parts; a rest that is absent is one number wide."""
    return tl.zeros((SIZE, MAIN), tl.float32), tl.zeros((SIZE, REST if REST else 1), tl.float32)


@triton.jit
def times(factor, vectors):
    """Multiply vectors in two parts by a number, or by one number for each vector, (tokens, 1)."""
    main, rest = vectors
    return main * factor, rest * factor


@triton.jit
def pair_bias(table, of_queries, of_keys, PRECISION: tl.constexpr):
    """Look up the bias of pairs: entry `of_keys` minus `of_queries` of the table, see `layout`.

    Tokens that are neighbours in a row of patches read neighbouring entries of the table, so the loads of a warp touch
    few sectors of the cache.
    """
    pointers = (table - of_queries) + of_keys
    if PRECISION == "interpreted":
        return tl.load(pointers)
    # With `tl.load` Triton would distribute the loaded numbers among threads in another layout, and exchange them
    # through shared memory.
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def kept_keys(valid, tokens, keys, PADDED: tl.constexpr):
    """Return which keys exist and are not padding."""
    keep = tokens < keys
    if PADDED:
        keep = keep & (tl.load(valid + tokens, mask=keep, other=0) != 0)
    return keep


@triton.jit
def place_of_block(item, heads, length, BLOCK: tl.constexpr):
    """Return sample, head, their joint index, and the tokens of a block."""
    blocks = tl.cdiv(length, BLOCK)
    pair = item // blocks
    return (
        (pair // heads).to(tl.int64),
        (pair % heads).to(tl.int64),
        pair.to(tl.int64),
        item % blocks * BLOCK + tl.arange(0, BLOCK),
    )
