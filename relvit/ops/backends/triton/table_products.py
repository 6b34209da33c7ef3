"""Products of queries with the tables by offset, and sums by table entry, for the Triton kernels.

`axis_logits.join_tables` joins a term's two tables, the table for rows above the table for columns. A block of queries
is multiplied by the entries of the joined table, `CHUNK` at a time, on Tensor Cores. An index (Nq, H + W) says which
entry a query uses for each row and each column of the key grid.

Entries never decrease along the last axis of the index, so each query uses an entry for a range of rows or columns, and
the sum over this range is a difference of two running sums. So no sum needs atomics.
"""

import triton
import triton.language as tl

# The kernels multiply this number of table entries at a time.
CHUNK = tl.constexpr(32)
# The kernels look up, or sum up, this number of rows and columns of the key grid at a time.
SPAN = tl.constexpr(16)


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """Add left right to total; in float32 without Tensor Cores, which would round inputs to TF32."""
    if PRECISION == "interpreted":
        # Triton's interpreter would multiply the bits of bfloat16 as integers.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def load_tokens(pointer, tokens, stride, keep, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load the vectors of some tokens, (tokens, BLOCK_DIM), zeros for tokens that are not kept."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = pointer + tokens[:, None] * stride + dims[None, :]
    if DIM == BLOCK_DIM:
        return tl.load(pointers, mask=keep[:, None], other=0.0)
    return tl.load(pointers, mask=keep[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_products(
    pointer, slots, inside, vectors, table, bias, index, queries, axes, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK_M: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store vectors . table + bias for each row and column of the key grid into the slots of `pointer`, (..., axes).

    `index` says which entry of `table` and `bias` belongs to a row or column.
    """
    for start in range(0, ENTRIES, CHUNK):
        place = start + tl.arange(0, CHUNK)
        products = tl.zeros((BLOCK_M, CHUNK), tl.float32)
        if TABLE:
            rows = load_tokens(table, place, DIM, place < ENTRIES, DIM, BLOCK_DIM)
            products = add_product(products, vectors, rows.trans(), PRECISION)
        if BIAS:
            products += tl.load(bias + place, mask=place < ENTRIES, other=0.0)[None, :]
        for first in range(0, axes, SPAN):
            axis = first + tl.arange(0, SPAN)
            keep = inside[:, None] & (axis < axes)[None, :]
            entry = tl.load(index + queries[:, None] * axes + axis[None, :], mask=keep, other=0).to(tl.int32) - start
            if ENTRIES > CHUNK:
                keep = keep & (entry >= 0) & (entry < CHUNK)
                entry = tl.where(keep, entry, 0)
            found = tl.gather(products, entry, 1).to(pointer.dtype.element_ty)
            tl.store(pointer + slots[:, None] * axes + axis[None, :], found, mask=keep)
    # Other threads of this Triton program read these products, so wait for all threads.
    tl.debug_barrier()


@triton.jit
def load_axis(pointer, slots, axes, inside, first, end, outside, SIZE: tl.constexpr):
    """Load a query's numbers for SIZE rows, or columns, of keys, (queries, SIZE); from `end` on they are `outside`."""
    place = first + tl.arange(0, SIZE)
    pointers = pointer + slots[:, None] * axes + place[None, :]
    return tl.load(pointers, mask=inside[:, None] & (place < end)[None, :], other=outside).to(tl.float32)


@triton.jit
def load_row(pointer, slots, axes, inside, row):
    """Load each query's number for one row of the key grid, (queries,)."""
    return tl.load(pointer + slots * axes + row, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def run_up(
    sums, slots, axes, inside, base, dtype, LOGARITHMS: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr
):
    """Turn numbers per row and column of the key grid, (..., axes) float32, into running sums.

    With `LOGARITHMS` the numbers are given as their logarithms in base 2 plus `base`. The numbers are rounded to
    `dtype`, in which they are multiplied, but the running sums stay in float32. So a difference of two running sums is,
    up to rounding in float32, a sum of rounded numbers.
    """
    before = tl.zeros((BLOCK_M, SPAN), tl.float32)
    number = tl.arange(0, SPAN)
    up_to = (number[:, None] <= number[None, :]).to(tl.float32).to(dtype)
    every = tl.full((SPAN, SPAN), 1.0, tl.float32).to(dtype)
    # Other threads of this Triton program have stored the numbers that are read next, so wait for all threads.
    tl.debug_barrier()
    for start in range(0, axes, SPAN):
        place = start + number
        pointers = sums + slots[:, None] * axes + place[None, :]
        keep = inside[:, None] & (place < axes)[None, :]
        if LOGARITHMS:
            numbers = tl.exp2(tl.load(pointers, mask=keep, other=-float("inf")) - base[:, None])
        else:
            numbers = tl.load(pointers, mask=keep, other=0.0)
        numbers = numbers.to(dtype)
        tl.store(pointers, add_product(before, numbers, up_to, PRECISION), mask=keep)
        before = add_product(before, numbers, every, PRECISION)
    tl.debug_barrier()


@triton.jit
def sums_of_entries(sums, bounds, slots, queries, axes, inside, place, ENTRIES: tl.constexpr):
    """Compute the sums for some entries as differences of running sums: (queries, entries) float32.

    `place` holds the numbers of these entries. `bounds` is (Nq, ENTRIES + 1): query i uses entry e at the positions
    bounds[i, e] to bounds[i, e + 1] - 1 of the axis of H rows and W columns.
    """
    keep = inside[:, None] & (place < ENTRIES)[None, :]
    pointers = bounds + queries[:, None] * (ENTRIES + 1) + place[None, :]
    begin, end = tl.load(pointers, mask=keep, other=0), tl.load(pointers + 1, mask=keep, other=0)
    last = sums + slots[:, None] * axes - 1
    return tl.load(last + end, mask=end > 0, other=0.0) - tl.load(last + begin, mask=begin > 0, other=0.0)
