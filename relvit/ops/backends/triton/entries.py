"""Products of queries with the tables by offset, and sums by table entry, for the Triton kernels.

A term's tables are joined, rows above columns, as `axis_logits.join_tables` does. A block of queries meets all entries
at once, on matrix units; `load_axis` then looks up by an index (Nq, H + W) what belongs to a row or column of the key
grid. Along rows, then columns, that index never decreases, so that the rows or columns of one entry are a range, and
sums over it are differences of running sums: no atomics.
"""

import triton
import triton.language as tl

# Entries that are multiplied at a time.
CHUNK = tl.constexpr(32)


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """total + left right, for float32 not on matrix units, which would round to ten bits."""
    if PRECISION == "interpreted":
        # To the interpreter bfloat16 is a number's bits.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def load_tokens(pointer, tokens, stride, keep, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load the vectors of some tokens, (tokens, BLOCK_DIM), zeros for those that are not kept."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    if DIM == BLOCK_DIM:
        return tl.load(pointers, mask=keep[:, None], other=0.0)
    return tl.load(pointers, mask=keep[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_products(
    pointer, slots, inside, vectors, table, bias, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store vectors . table + bias for all entries into the slots (BLOCK_M,) of (..., ENTRIES)."""
    for start in range(0, ENTRIES, CHUNK):
        place = start + tl.arange(0, CHUNK)
        products = tl.zeros((BLOCK_M, CHUNK), tl.float32)
        if TABLE:
            rows = load_tokens(table, place, DIM, place < ENTRIES, DIM, BLOCK_DIM)
            products = add_product(products, vectors, rows.trans(), PRECISION)
        if BIAS:
            products += tl.load(bias + place, mask=place < ENTRIES, other=0.0)[None, :]
        pointers = pointer + slots[:, None] * ENTRIES + place[None, :]
        stored = inside[:, None] & (place < ENTRIES)[None, :]
        tl.store(pointers, products.to(pointer.dtype.element_ty), mask=stored)
    # Other threads of this program read them.
    tl.debug_barrier()


@triton.jit
def load_axis(
    products, index, slots, queries, axes, inside, first, end, outside, SIZE: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """Look up the products of queries for each of SIZE rows, or columns, (queries, SIZE); `outside` after `end`."""
    place = first + tl.arange(0, SIZE)
    keep = inside[:, None] & (place < end)[None, :]
    entry = tl.load(index + queries[:, None] * axes + place[None, :], mask=keep, other=0)
    return tl.load(products + slots[:, None] * ENTRIES + entry, mask=keep, other=outside).to(tl.float32)


@triton.jit
def run_up(sums, slots, axes, inside, base, LOGARITHMS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Turn numbers per row and column, (..., axes) float32, or their logarithms over `base`, into running sums."""
    before = tl.zeros((BLOCK_M,), tl.float32)
    # What is stored here comes from other threads of this program.
    tl.debug_barrier()
    for start in range(0, axes, 16):
        place = start + tl.arange(0, 16)
        pointers = sums + slots[:, None] * axes + place[None, :]
        keep = inside[:, None] & (place < axes)[None, :]
        if LOGARITHMS:
            numbers = tl.exp2(tl.load(pointers, mask=keep, other=-float("inf")) - base[:, None])
        else:
            numbers = tl.load(pointers, mask=keep, other=0.0)
        tl.store(pointers, tl.cumsum(numbers, 1) + before[:, None], mask=keep)
        before += tl.sum(numbers, 1)
    tl.debug_barrier()


@triton.jit
def sums_of_entries(sums, bounds, slots, queries, axes, inside, start, ENTRIES: tl.constexpr):
    """Sum up by entry from running sums, for the CHUNK entries from `start`, (queries, CHUNK) float32.

    `bounds` (Nq, ENTRIES + 1): the rows and columns of entry e are those from bounds[e] to bounds[e + 1].
    """
    place = start + tl.arange(0, CHUNK)
    keep = inside[:, None] & (place < ENTRIES)[None, :]
    pointers = bounds + queries[:, None] * (ENTRIES + 1) + place[None, :]
    begin, end = tl.load(pointers, mask=keep, other=0), tl.load(pointers + 1, mask=keep, other=0)
    last = sums + slots[:, None] * axes - 1
    return tl.load(last + end, mask=end > 0, other=0.0) - tl.load(last + begin, mask=begin > 0, other=0.0)


@triton.jit
def add_to_table(
    partial, first, start, sums, vectors, factor, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add sums^T vectors to a program's own part of a table's gradient, (ENTRIES, DIM); at `first` it holds nothing."""
    product = tl.zeros((CHUNK, BLOCK_DIM), tl.float32)
    product = add_product(product, sums.to(vectors.dtype).trans(), vectors, PRECISION) * factor
    place, dims = start + tl.arange(0, CHUNK), tl.arange(0, BLOCK_DIM)
    pointers = partial + place[:, None] * DIM + dims[None, :]
    keep = (place < ENTRIES)[:, None] & (dims < DIM)[None, :]
    tl.store(pointers, product + tl.load(pointers, mask=keep & ~first, other=0.0), mask=keep)
