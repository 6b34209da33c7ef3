"""Guard against tensors that MPS kernels index with 32 bits: they would compute wrong numbers without an error."""

from __future__ import annotations

from relvit.ops.backends import gathered, tiled
from relvit.ops.backends.axis_logits import WIDTH_MULTIPLE, query_axes
from relvit.ops.inputs import AttentionInputs, added_width
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms, is_stock

# On these kinds of devices some kernels of PyTorch 2.14, such as `bmm`, compute wrong results without an error if a
# tensor has more numbers than `LARGEST` (pytorch/pytorch issue 197636).
NARROW_DEVICES = ("mps",)
LARGEST = 2**31 - 1


def largest_tensor(inputs: AttentionInputs, backend: str) -> int:
    """Return an upper bound for the number of elements of a backend's largest tensor, results and operands included.

    For `fused`, N x N weights are counted, because the stock attention that it calls keeps these weights on MPS in
    training.
    """
    (batch, heads, queries, _), keys = inputs.query.shape, inputs.key.shape[2]
    dims = inputs.query.shape[3] + added_width(inputs.terms, inputs.query.dtype), inputs.value.shape[3]
    axes = inputs.key_grid.height + inputs.key_grid.width + WIDTH_MULTIPLE
    if is_stock(inputs.terms):
        axes = 0
    if inputs.terms.query is not None:
        axes += sum(axis.size for axis in query_axes(inputs))
    per_token = max(dims) + axes + WIDTH_MULTIPLE if backend == "fused" else max(*dims, axes)
    if backend == "tiled":
        samples, of_heads, of_queries = tiled.tile_size(inputs.query, inputs.key)
        pairs = min(samples, batch) * min(of_heads, heads) * min(of_queries, queries) * keys
    elif backend == "gathered":
        pairs = batch * heads * min(gathered.tile_queries(inputs.query, inputs.key), queries) * keys
    else:
        pairs = batch * heads * queries * keys
    entries = max(_entries(*term) for term in zip(RelativeTerms._fields[:4], (*inputs.terms,)[:4], strict=True))
    by_token = batch * heads * max(queries, keys) * max(per_token, entries)
    # `reference` stores a vector of head_dim numbers for each pair of tokens, so count the numbers of all these
    # vectors.
    return max(by_token, pairs * max(dims) if backend == "reference" else pairs)


def check_index_range(inputs: AttentionInputs, backend: str) -> None:
    """Raise ValueError if a tensor of a backend would have more elements than the device's kernels can index."""
    if inputs.query.device.type not in NARROW_DEVICES:
        return
    hint = "smaller batches, or an image in parts (`relvit.models.set_reach`)"
    if backend not in ("tiled", "gathered") and largest_tensor(inputs, "tiled") <= LARGEST:
        hint = f"backend='tiled', {hint}"
    what = f"attention of {inputs.query.shape[2]} queries to {inputs.key.shape[2]} keys by backend {backend!r}"
    check_tensor_size(inputs.query.device.type, largest_tensor(inputs, backend), what, hint)


def check_tensor_size(device: str, number: int, what: str, hint: str = "smaller batches or images") -> None:
    """Raise ValueError if an operation may have a tensor of more elements than a device's kernels can index.

    `number` is an upper bound for the number of elements of the largest tensor. The message names the operation with
    its sizes, `what`, and says what to use instead, `hint`.
    """
    if device in NARROW_DEVICES and number > LARGEST:
        raise ValueError(
            f"{what} has a tensor of up to {number} numbers; kernels of {device} count to 2^31 - 1, and are wrong "
            f"beyond: use {hint}"
        )


def _entries(name: str, term: AxisTables | JointTable | None) -> int:
    """Count the vectors, or scalars of a bias, of joined tables, zeros included."""
    if term is None:
        return 0
    axis = -1 if name == "bias" else -2
    sizes = [table.shape[axis] for table in term]
    if isinstance(term, JointTable):
        sizes = [term.table.shape[axis - 1] * term.table.shape[axis]]
    return sum(sizes) + 1 + WIDTH_MULTIPLE
