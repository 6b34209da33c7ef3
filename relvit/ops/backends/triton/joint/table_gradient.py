"""The Triton kernel for the gradient of a joint bias table: sums over all pairs at one offset, without atomics.

A tile is a rectangle of queries and a rectangle of keys, ROWS by COLS patches each. If both rectangles move by the same
number of patches, each pair of places in the tile keeps its offset. So each Triton program takes one distance between
rectangles, and adds up the gradients of the logits over samples and rectangles in one tile of registers; only at the
end it sums over the pairs of places that have the same offset. The order of all sums is fixed.

For each pair of tokens the kernel computes two products that backward also computes (queries with keys, gradients with
values), but it needs neither atomics nor sums within every tile.

The kernel stores its results in `sums`, with 2 ROWS rows for the 2 ROWS - 1 row offsets of the pairs in a tile. If the
distance between the rectangles grows by one rectangle, each row offset grows by ROWS. So a row offset occurs at one or
two distances, and so does a column offset: for each part of the samples, `sums` holds at most 2 x 2 = 4 float32 numbers
per offset and head, if the sides of the grids are rounded up to whole rectangles.
"""

import triton
import triton.language as tl

from relvit.ops.backends.triton.joint.tiles import add_products_of, load_vectors


@triton.jit
def joint_backward_table(
    query, key, value, valid, table, grad, lse, means, sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token,
    valid_batch, entries, first, samples, splits, heads, height, width, prefix, key_height, key_width, key_prefix,
    scale,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum up the gradients of logits by offset, for one distance of rectangles, one head and a part of the samples.

    The axes of tensors are as in `joint_backward_queries`; `first` is the index of a head's first entry in the table.
    `sums` is (splits, heads, distances of rows, distances of columns, 2 ROWS, 2 COLS) float32. The last of the 2 ROWS
    row offsets and the last of the 2 COLS column offsets have zeros, because no pair in a tile has these offsets.
    Prefix tokens are left out.
    """
    rows, key_rows = tl.cdiv(height, ROWS), tl.cdiv(key_height, ROWS)
    cols, key_cols = tl.cdiv(width, COLS), tl.cdiv(key_width, COLS)
    down, across = rows + key_rows - 1, cols + key_cols - 1
    item = tl.program_id(0)
    head = (item // (down * across) % heads).to(tl.int64)
    split = item // (down * across) // heads
    # The rectangle of keys is `below` rectangles below the rectangle of queries, and `beside` rectangles to its right.
    below, beside = item // across % down - (rows - 1), item % across - (cols - 1)
    first_row, first_col = tl.maximum(0, -below), tl.maximum(0, -beside)
    number_of_cols = tl.minimum(cols, key_cols - beside) - first_col
    number = (tl.minimum(rows, key_rows - below) - first_row) * number_of_cols

    place = tl.arange(0, ROWS * COLS)
    y, x = place // COLS, place % COLS
    row = (y + below * ROWS)[None, :] - y[:, None] + height - 1
    col = (x + beside * COLS)[None, :] - x[:, None] + width - 1
    columns = width + key_width - 1
    # In pairs beyond these offsets, the query or the key is outside of its grid, so no entry of the table is for them.
    exists = (row >= 0) & (row < height + key_height - 1) & (col >= 0) & (col < columns)
    bias = tl.load(table + head * entries + first + row * columns + col, mask=exists, other=0.0)

    query += head * q_head
    key += head * k_head
    value += head * v_head
    grad += head * g_head
    length = prefix + height * width
    total = tl.zeros((ROWS * COLS, ROWS * COLS), tl.float32)
    for step in range(split * samples // splits * number, (split + 1) * samples // splits * number):
        batch = (step // number).to(tl.int64)
        top = (first_row + step % number // number_of_cols) * ROWS
        left = (first_col + step % number % number_of_cols) * COLS
        inside = (top + y < height) & (left + x < width)
        queries = prefix + (top + y) * width + left + x
        to_row, to_col = top + below * ROWS + y, left + beside * COLS + x
        keep = (to_row < key_height) & (to_col < key_width)
        tokens = key_prefix + to_row * key_width + to_col
        if PADDED:
            keep = keep & (tl.load(valid + batch * valid_batch + tokens, mask=keep, other=0) != 0)
        q = load_vectors(query + batch * q_batch, queries, q_token, inside, DIM, MAIN, REST)
        k = load_vectors(key + batch * k_batch, tokens, k_token, keep, DIM, MAIN, REST)
        pairs = add_products_of(bias, q, k, REST, PRECISION)
        pairs = tl.where(keep[None, :], pairs, -float("inf"))
        at = (batch * heads + head) * length + queries
        base = tl.load(lse + at, mask=inside, other=float("inf"))
        weights = tl.exp2(pairs * scale - base[:, None])
        do = load_vectors(grad + batch * g_batch, queries, g_token, inside, VALUE_DIM, VALUE_MAIN, VALUE_REST)
        v = load_vectors(value + batch * v_batch, tokens, v_token, keep, VALUE_DIM, VALUE_MAIN, VALUE_REST)
        mean = tl.load(means + at, mask=inside, other=0.0)
        grad_weights = add_products_of(tl.zeros_like(total), do, v, VALUE_REST, PRECISION)
        total += weights * (grad_weights - mean[:, None])

    sums += item.to(tl.int64) * (4 * ROWS * COLS)
    shift = tl.arange(0, 2 * COLS)
    to_x = x[:, None] + shift[None, :] - (COLS - 1)
    for row_shift in range(2 * ROWS):
        to_y = y[:, None] + row_shift - (ROWS - 1)
        meets = (to_y >= 0) & (to_y < ROWS) & (to_x >= 0) & (to_x < COLS)
        found = tl.gather(total, tl.where(meets, to_y * COLS + to_x, 0), 1)
        tl.store(sums + row_shift * 2 * COLS + shift, tl.sum(tl.where(meets, found, 0.0), 0))
