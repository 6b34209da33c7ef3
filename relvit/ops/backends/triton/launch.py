"""Launch of the Triton kernels: block sizes, arguments, prefix tokens apart, and the autograd function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.backends.tile import new_tokens
from relvit.ops.backends.triton.backward import backward_keys, backward_queries
from relvit.ops.backends.triton.forward import forward
from relvit.ops.checks import check_backward
from relvit.ops.tracing import without_autocast

LOG2_E = math.log2(math.e)
# Each multiprocessor of the GPU gets this number of Triton programs, more than can run on it at once. When a program
# ends, the next one starts, so the multiprocessor is idle only briefly at the end.
PROGRAMS = 4


class Blocks(NamedTuple):
    """Sizes of a kernel's tiles: queries, keys, warps, and stages of the pipeline of loads.

    The keys of a tile are a rectangle of patches. With `by_row` the rectangle has as few rows of the grid as possible,
    a single row if the grid is more than `keys` / 2 patches wide. Without `by_row` the rectangle has the shape with
    which the fewest tiles cover the grid.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    by_row: bool = False


# Each key names the kernel, whether heads are wider than 64, and whether the GPU is a Hopper (sm_90), whose Tensor
# Cores read shared memory and leave more registers. The values are the largest tiles that `tools/gpu/kernels.py`
# compiles without spilled registers, `by_row` where tiles of few rows take fewer instructions; `tools/gpu/tune.py`
# finds the fastest tiles for a GPU. `joint/joint_launch.py` has the tiles of kernels with a joint bias.
BLOCKS = {
    ("forward", False, False): Blocks(128, 32, 8, 2, by_row=True),
    ("forward", True, False): Blocks(128, 16, 8, 2),
    ("forward", False, True): Blocks(128, 64, 8, 3, by_row=True),
    ("forward", True, True): Blocks(128, 64, 8, 2),
    ("backward_queries", False, False): Blocks(64, 16, 4, 2),
    ("backward_queries", True, False): Blocks(32, 32, 4, 2),
    ("backward_queries", False, True): Blocks(128, 64, 8, 2),
    ("backward_queries", True, True): Blocks(64, 32, 8, 2),
    ("backward_keys", False, False): Blocks(16, 64, 4, 2),
    ("backward_keys", True, False): Blocks(32, 32, 4, 2),
    ("backward_keys", False, True): Blocks(64, 64, 4, 2),
    ("backward_keys", True, True): Blocks(64, 64, 8, 2),
}
# In float32 all kernels have these tiles, and do not use Tensor Cores, because Tensor Cores would round inputs to TF32.
# Larger tiles would spill registers.
BLOCKS_OF_FLOAT32 = Blocks(16, 32, 4, 1)


def tile_shape(keys: int, height: int, width: int) -> tuple[int, int]:
    """Divide a tile of keys into rows and columns of the grid such that the fewest tiles cover the grid."""
    # Among sizes that need equally many tiles, `min` takes the first one in this list.
    columns = [size for size in (16, 8, 32, 64, 4, 2, 1) if size <= keys]
    cols = min(columns, key=lambda size: -(-height // (keys // size)) * -(-width // size))
    return keys // cols, cols


def row_shape(keys: int, height: int, width: int) -> tuple[int, int]:
    """Divide a tile of keys into as few rows of the grid as possible."""
    cols = min(keys, triton.next_power_of_2(width))
    return keys // cols, cols


class Operands(NamedTuple):
    """Tensors that all kernels read, in the order of their parameters; None where a term is absent."""

    query: Tensor  # (B, heads, N, dim); key and value likewise
    key: Tensor
    value: Tensor
    position: Tensor | None  # (B, heads, Nq, dim), the vectors that the key table is multiplied by; None: the query
    valid: Tensor | None  # (B, Nk) bytes, zero for padding
    key_table: Tensor | None = None  # (heads, entries, dim)
    bias: Tensor | None = None  # (heads, entries)
    value_table: Tensor | None = None  # (heads, entries, dim)
    # The module `lookup` describes these indices and bounds of the key and value tables.
    key_index: Tensor | None = None
    key_bounds: Tensor | None = None
    value_index: Tensor | None = None
    value_bounds: Tensor | None = None


class Variant(NamedTuple):
    """Constants of the compilation, besides data types and sizes of tiles."""

    dims: tuple[int, int, int]  # widths of queries, of values and of the vectors that the key table is multiplied by
    entries: tuple[int, int]  # numbers of entries of the key table or bias, and of the value table; 0 where absent
    position: str  # what is multiplied by the key table: 'query', 'own' (`Operands.position`); '' without table
    bias: bool
    # If this is True, forward also stores `entries`, the attention weights summed by entry of the value table, which
    # backward needs.
    save: bool
    padded: bool


def variant(operands: Operands, save: bool) -> Variant:
    """Return the variant of the kernels for operands."""
    query, _, value, position, valid, key_table, bias, value_table = operands[:8]
    tables = (bias if key_table is None else key_table, value_table)
    dims = (query.shape[-1], value.shape[-1], (query if position is None else position).shape[-1])
    kind = "" if key_table is None else "query" if position is None else "own"
    entries = tuple(0 if table is None else table.shape[1] for table in tables)
    return Variant(dims, entries, kind, bias is not None, save, valid is not None)


@lru_cache(maxsize=256)
def constants(
    kernel: Any, dtype: torch.dtype, size: tuple[int, int], variant: Variant, hopper: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the constants of a kernel for a key grid's `size`, and the options of its compilation.

    A launch calls this function several times, so both results are cached, and callers must not change them.
    """
    dims = variant.dims
    blocks = BLOCKS[kernel.__name__, max(dims) > 64, hopper] if dtype != torch.float32 else BLOCKS_OF_FLOAT32
    # In half precision `tl.dot` sums over at least 16 keys, so tiles have at least 16, even if the grid has fewer.
    keys = min(blocks.keys, max(16, triton.next_power_of_2(size[0] * size[1])))
    rows, cols = row_shape(keys, *size) if blocks.by_row else tile_shape(keys, *size)
    named = {}
    for name, dim in zip(("DIM", "VALUE_DIM", "POSITION_DIM"), dims, strict=True):
        named |= {name: dim, "BLOCK_" + name.removesuffix("_DIM"): max(16, triton.next_power_of_2(dim))}
    precision = "ieee" if isinstance(kernel, triton.JITFunction) else "interpreted"
    named |= {"BLOCK_M": blocks.queries, "ROWS": rows, "COLS": cols, "STRIPS": size[1] > cols, "PRECISION": precision}
    named |= dict(zip(("KEY_ENTRIES", "VALUE_ENTRIES"), variant.entries, strict=True))
    named |= dict(zip(("POSITION", "BIAS", "SAVE", "PADDED"), variant[2:], strict=True))
    return named, {"num_warps": blocks.warps, "num_stages": blocks.stages}


class Attention(torch.autograd.Function):
    """The kernels, forward and backward.

    `apply(scale, (prefix, height, width), *operands)` returns the attention (B, heads, Nq, value_dim). Tables may have
    another dtype than queries, keys and values; the gradient of a table has the table's dtype.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, scale: float, grid: tuple[int, int, int], *tensors: Tensor | None) -> Tensor:
        operands = Operands(*tensors)
        query, value, bias = operands.query, operands.value, operands.bias
        ctx.tables = [None if table is None else table.dtype for table in operands[5:8]]
        vectors = {name: with_unit_stride(getattr(operands, name)) for name in ("query", "key", "value", "position")}
        tables = {name: getattr(operands, name) for name in ("key_table", "value_table")}
        tables = {name: None if table is None else table.to(query.dtype).contiguous() for name, table in tables.items()}
        operands = operands._replace(**vectors, **tables, bias=None if bias is None else bias.float().contiguous())
        launch = Launch(forward, operands, grid, scale, variant(operands, any(ctx.needs_input_grad)))
        out = new_tokens(query, value.shape[-1])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        of_key, of_value = launch.variant.entries
        entries = new_tokens(query, of_value) if launch.variant.save else None
        logits, sums = (launch.workspace(sum(grid[1:]) * (number > 0)) for number in (of_key, of_value))
        launch.run((out,), (lse, entries, logits, sums))
        ctx.launch = launch._replace(operands=None)
        ctx.save_for_backward(*operands, out, lse, entries)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("triton", grad)
        *saved, out, lse, entries = ctx.saved_tensors
        operands = Operands(*saved)
        query, key, value = operands[:3]
        launch = ctx.launch._replace(operands=operands, kernel=backward_queries)
        prefix, height, width = launch.grid
        of_key, of_value = launch.variant.entries
        grad = with_unit_stride(grad.to(query.dtype))
        grads = [None if tensor is None else new_tokens(tensor, tensor.shape[-1]) for tensor in operands[:4]]
        grad_query, grad_key, grad_value, grad_position = grads
        means = torch.empty_like(lse)
        logits, products = (query.new_empty(*query.shape[:3], height + width) for _ in range(2))
        grad_entries, sums = new_tokens(query, of_key), launch.workspace((height + width) * (of_key > 0))
        launch.run((grad, out, grad_query, grad_position), (lse, means, logits, products, grad_entries, sums))
        launch = launch._replace(kernel=backward_keys)
        launch.run((grad, grad_key, grad_value), (lse, means, logits, products))
        if prefix:
            # Without terms the places of the keys do not matter, and prefix keys have no terms. So another launch
            # treats the prefix keys as one column of patches.
            alone = Operands(query, key, value, None, operands.valid)
            launch = launch._replace(operands=alone, grid=(0, prefix, 1), variant=variant(alone, True))
            launch.run((grad, grad_key, grad_value), (lse, means, None, None))
        met = query if operands.position is None else operands.position
        # Users may call backward inside of autocast, but forward ran without autocast, so switch it off here, too.
        with without_autocast(grad.device):
            of_tables = (
                None if operands.key_table is None else _over_tokens(grad_entries, met),
                None if operands.bias is None else grad_entries.sum((0, 2), dtype=torch.float32),
                _over_tokens(entries, grad) if of_value else None,
            )
        of_tables = (
            None if table is None else table.to(dtype) for table, dtype in zip(of_tables, ctx.tables, strict=True)
        )
        return None, None, *grads, None, *of_tables, None, None, None, None


class Launch(NamedTuple):
    """A kernel's launch on all samples and heads of its operands; `grid` is prefix, height, width of the keys."""

    kernel: Any
    operands: Operands
    grid: tuple[int, int, int]
    scale: float
    variant: Variant

    def constants(self) -> tuple[dict[str, Any], dict[str, int]]:
        query = self.operands.query
        hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
        return constants(self.kernel, query.dtype, self.grid[1:], self.variant, hopper)

    def work(self) -> int:
        """Count the blocks of queries, or the tiles of keys."""
        batch, heads, length, _ = self.operands.query.shape
        named, _ = self.constants()
        if self.kernel is backward_keys:
            tiles = triton.cdiv(self.grid[1], named["ROWS"]) * triton.cdiv(self.grid[2], named["COLS"])
            return batch * heads * tiles
        return batch * heads * triton.cdiv(length, named["BLOCK_M"])

    def programs(self) -> int:
        query = self.operands.query
        processors = 1
        if query.is_cuda:
            processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        return min(self.work(), PROGRAMS * processors)

    def workspace(self, width: int) -> Tensor:
        """Allocate `width` float32 numbers for each program and query of a block; they stay in the L2 cache."""
        size = self.programs() * self.constants()[0]["BLOCK_M"]
        return self.operands.query.new_empty(size, width, dtype=torch.float32)

    def largest_offset(self, vectors: Sequence[Tensor | None]) -> int:
        """Return the largest offset within a head, which kernels compute in 32 bits; other offsets have 64."""
        operands, (_, height, width) = self.operands, self.grid
        tokens = [tensor for tensor in (*operands[:4], *vectors) if tensor is not None]
        of_tokens = max((tensor.shape[2] - 1) * tensor.stride(2) + tensor.shape[3] for tensor in tokens)
        # Indices, bounds, logits and workspaces have at most `columns` numbers in each row, and at most `rows` rows:
        # one for each query, or, in workspaces, one for each query of a block in each Triton program.
        columns = max(height + width, *(entries + 1 for entries in self.variant.entries))
        rows = max(operands.query.shape[2], self.programs() * self.constants()[0]["BLOCK_M"])
        return max(of_tokens, rows * columns)

    def run(self, vectors: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...]) -> None:
        """Run the kernel; after the operands it takes (B, heads, N, dim) tensors with strides, then contiguous ones."""
        operands = self.operands
        query, key, value, position, valid = operands[:5]
        work = self.work()
        if not work:
            return
        if (largest := self.largest_offset(vectors)) >= 2**31:
            raise ValueError(
                f"backend 'triton' computes offsets in 32 bits; {query.shape[2]} queries with {key.shape[2]} keys need "
                f"{largest}, above 2^31 - 1: use 'fused' or 'tiled', or an image in parts (`relvit.models.set_reach`)"
            )
        strides = [number for tensor in (query, key, value, position) for number in _strides(tensor)]
        strides += [0 if valid is None else valid.stride(0)]
        strides += [number for tensor in vectors for number in _strides(tensor)]
        # A kernel never reads an absent tensor, so any pointer may take its place.
        pointers = (query if tensor is None else tensor for tensor in (*operands, *vectors, *others))
        index = operands.value_index if operands.key_index is None else operands.key_index
        batched = int(index is not None and index.shape[0] > 1)
        sizes = (work, query.shape[1], query.shape[2], batched, *self.grid, self.scale * LOG2_E)
        named, options = self.constants()
        programs = work if self.kernel is backward_keys else self.programs()
        # Triton launches kernels on the current GPU, which need not be the GPU of the tensors.
        with torch.cuda.device_of(query):
            self.kernel[(programs,)](*pointers, *strides, *sizes, **named, **options)


def with_unit_stride(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor unless its last axis is contiguous in memory."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]


def _over_tokens(entries: Tensor, vectors: Tensor) -> Tensor:
    """Sum up the products of (B, heads, N, entries) and (B, heads, N, dim) over all tokens: (heads, entries, dim)."""
    # A product per head reads tensors in the projection's memory layout, without a copy.
    one, other = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (entries, vectors))
    return torch.bmm(one.mT, other)
