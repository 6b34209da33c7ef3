"""Launch of the Triton kernels for a joint bias: block sizes, wide heads in two parts, sums of table gradients."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.backends.pair_bias import offset_table
from relvit.ops.backends.tile import new_tokens
from relvit.ops.backends.triton.joint.joint_backward import joint_backward_keys, joint_backward_queries
from relvit.ops.backends.triton.joint.joint_forward import joint_forward
from relvit.ops.backends.triton.joint.offsets import by_entry, layout
from relvit.ops.backends.triton.joint.table_gradient import joint_backward_table
from relvit.ops.backends.triton.launch import LOG2_E, Blocks, with_unit_stride
from relvit.ops.checks import check_backward
from relvit.ops.grid import Grid, key_mask, num_tokens
from relvit.ops.inputs import AttentionInputs
from relvit.ops.tracing import without_autocast

# For the gradient of the table, samples are divided among Triton programs, until each multiprocessor of the GPU has up
# to this number of programs.
PROGRAMS = 4

# Each key names the kernel, whether heads are wider than 64, and whether the GPU is a Hopper (sm_90). The values are
# the largest tiles that `tools/gpu/kernels.py` compiles without spilled registers, also with Triton 3.6.
BLOCKS = {
    ("joint_forward", False, False): Blocks(128, 32, 8, 2),
    ("joint_forward", True, False): Blocks(128, 32, 8, 2),
    ("joint_forward", False, True): Blocks(128, 64, 8, 2),
    ("joint_forward", True, True): Blocks(128, 64, 8, 2),
    ("joint_backward_queries", False, False): Blocks(128, 32, 8, 2),
    ("joint_backward_queries", True, False): Blocks(64, 32, 8, 2),
    ("joint_backward_queries", False, True): Blocks(128, 64, 8, 2),
    ("joint_backward_queries", True, True): Blocks(64, 64, 8, 2),
    ("joint_backward_keys", False, False): Blocks(32, 32, 4, 2),
    ("joint_backward_keys", True, False): Blocks(16, 64, 8, 2),
    ("joint_backward_keys", False, True): Blocks(64, 64, 4, 2),
    ("joint_backward_keys", True, True): Blocks(64, 64, 8, 2),
    ("joint_backward_table", False, False): Blocks(64, 64, 8, 2),
    ("joint_backward_table", True, False): Blocks(32, 32, 4, 2),
    ("joint_backward_table", False, True): Blocks(64, 64, 4, 2),
    ("joint_backward_table", True, True): Blocks(64, 64, 8, 2),
}
# In float32 all kernels have these tiles, and do not use Tensor Cores, because Tensor Cores would round inputs to TF32.
BLOCKS_OF_FLOAT32 = Blocks(16, 16, 4, 2)


def tile_shape(patches: int, *sizes: tuple[int, int]) -> tuple[int, int]:
    """Divide a tile into rows and columns of patches such that the fewest tiles cover grids of these sizes."""

    def covered(cols: int) -> int:
        rows = patches // cols
        return math.prod(-(-height // rows) * -(-width // cols) for height, width in sizes)

    # Among equally good sizes `min` takes the first, which has the fewest rows of patches, so that the last loop of
    # `joint_backward_table`, over 2 ROWS row offsets, is shortest.
    cols = min((patches >> power for power in range(patches.bit_length())), key=covered)
    return patches // cols, cols


def parts(dim: int) -> tuple[int, int]:
    """Return the widths of two parts of vectors, powers of two from 16 on; one width and 0 if two save nothing."""
    whole = max(16, triton.next_power_of_2(dim))
    rest = max(16, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if 16 < whole // 2 + rest < whole else (whole, 0)


@lru_cache(maxsize=256)
def constants(
    kernel: Any, dtype: torch.dtype, dims: tuple[int, int], grid: Grid, key_grid: Grid, padded: bool, hopper: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the constants of a kernel for widths of queries and values, and the options of its compilation.

    A launch calls this function several times, so both results are cached, and callers must not change them.
    """
    blocks = BLOCKS_OF_FLOAT32 if dtype == torch.float32 else BLOCKS[kernel.__name__, max(dims) > 64, hopper]
    precision = "ieee" if isinstance(kernel, triton.JITFunction) else "interpreted"
    named: dict[str, Any] = {"PADDED": padded, "PRECISION": precision}
    for prefix, dim in zip(("", "VALUE_"), dims, strict=True):
        main, rest = parts(dim)
        named |= {prefix + "DIM": dim, prefix + "MAIN": main, prefix + "REST": rest}
    if kernel is joint_backward_table:
        named["ROWS"], named["COLS"] = tile_shape(blocks.queries, grid[:2], key_grid[:2])
    else:
        lengths = [num_tokens(tokens) for tokens in (grid, key_grid)]
        # In half precision `tl.dot` sums over at least 16 tokens, so blocks have at least 16, even if the grid has
        # fewer.
        queries, keys = (
            min(block, max(16, triton.next_power_of_2(length)))
            for block, length in zip(blocks[:2], lengths, strict=True)
        )
        named |= {"BLOCK_M": queries, "BLOCK_N": keys, "EDGE": lengths[1] % keys > 0}
    return named, {"num_warps": blocks.warps, "num_stages": blocks.stages}


class Operands(NamedTuple):
    """Tensors that all kernels read, in the order of their parameters."""

    query: Tensor  # (B, heads, N, dim); key and value likewise
    key: Tensor
    value: Tensor
    valid: Tensor | None  # (B, Nk) bytes, zero for padding
    # The table (heads, entries), float32, is the bias by offset, padded and ordered as `offsets.layout` describes. The
    # table is divided by the scale, because the kernels multiply all logits, the bias included, by the scale.
    table: Tensor


class Launch(NamedTuple):
    """A kernel's launch on all samples and heads; both grids have neither `coords` nor `valid`."""

    operands: Operands
    grid: Grid
    key_grid: Grid
    scale: float

    def constants(self, kernel: Any) -> tuple[dict[str, Any], dict[str, int]]:
        query, _, value, valid, _ = self.operands
        hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
        dims = (query.shape[-1], value.shape[-1])
        return constants(kernel, query.dtype, dims, self.grid, self.key_grid, valid is not None, hopper)

    def run(self, kernel: Any, vectors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        """Run a kernel over blocks of tokens; `vectors` are (B, heads, N, dim), the others contiguous."""
        query, key, _, _, table = self.operands
        named, _ = self.constants(kernel)
        batch, heads, length, _ = query.shape
        keys = key.shape[2]
        if kernel is joint_backward_keys:
            blocks = triton.cdiv(keys, named["BLOCK_N"])
        else:
            blocks = triton.cdiv(length, named["BLOCK_M"])
        found = layout(self.grid, self.key_grid, query.device)[:2]
        sizes = (heads, length, keys, table.shape[1])
        self._start(kernel, batch * heads * blocks, found, vectors, others, sizes)

    def sums(self, grad: Tensor, lse: Tensor, means: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Compute the gradients of logits by offset with `joint_backward_table`; return them and the tile's shape."""
        query, table = self.operands.query, self.operands.table
        first = layout(self.grid, self.key_grid, query.device).before
        named, _ = self.constants(joint_backward_table)
        tile, (samples, heads) = (named["ROWS"], named["COLS"]), query.shape[:2]
        # These numbers say how many vertical and how many horizontal distances, counted in rectangles, there are
        # between a rectangle of queries and a rectangle of keys.
        distances = [
            triton.cdiv(size, of_tile) + triton.cdiv(key_size, of_tile) - 1
            for size, key_size, of_tile in zip(self.grid, self.key_grid, tile, strict=False)
        ]
        programs = heads * math.prod(distances)
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
        splits = max(1, min(samples, PROGRAMS * processors // programs))
        sums = query.new_empty(splits, heads, *distances, *(2 * size for size in tile), dtype=torch.float32)
        sizes = (table.shape[1], first, samples, splits, heads, *self.grid[:3], *self.key_grid[:3])
        self._start(joint_backward_table, splits * programs, (), (grad,), (lse, means, sums), sizes)
        return sums, tile

    def _start(
        self,
        kernel: Any,
        programs: int,
        found: tuple[Tensor, ...],
        vectors: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
        sizes: tuple[int, ...],
    ) -> None:
        query, key, value, valid, _ = self.operands
        self._check_offsets((query, key, value, *vectors))
        # A kernel never reads an absent tensor, so any pointer may take its place.
        pointers = (query if tensor is None else tensor for tensor in (*self.operands, *found, *vectors, *others))
        strides = [number for tensor in (query, key, value, *vectors) for number in tensor.stride()[:3]]
        strides += [0 if valid is None else valid.stride(0)]
        named, options = self.constants(kernel)
        # Triton launches kernels on the current GPU, which need not be the GPU of the tensors.
        with torch.cuda.device_of(query):
            kernel[(programs,)](*pointers, *strides, *sizes, self.scale * LOG2_E, **named, **options)

    def _check_offsets(self, tokens: tuple[Tensor, ...]) -> None:
        """Raise where an offset within a head, which kernels compute in 32 bits, would be too large."""
        query, key = self.operands[:2]
        largest = max((tensor.shape[2] - 1) * tensor.stride(2) + tensor.shape[3] for tensor in tokens)
        if largest >= 2**31 or self.operands.table.shape[1] >= 2**31:
            raise ValueError(
                f"backend 'triton' computes offsets in 32 bits; {query.shape[2]} queries with {key.shape[2]} keys need "
                f"{max(largest, self.operands.table.shape[1])}: use 'gathered', or an image in parts "
                "(`relvit.models.set_reach`)"
            )


class JointAttention(torch.autograd.Function):
    """The kernels, forward and backward.

    `apply(inputs, query, key, value, table)` returns the attention (B, heads, Nq, value_dim). The table may have
    another dtype than queries, keys and values; the table's gradient has the table's dtype.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: AttentionInputs, *tensors: Tensor) -> Tensor:
        query, key, value, table = tensors
        # Kernels only read vectors whose last axis is contiguous in memory, so copy all others.
        query, key, value = (with_unit_stride(tensor) for tensor in (query, key, value))
        valid = key_mask(inputs.key_grid)
        if valid is not None:
            valid = valid.to(torch.uint8).expand(query.shape[0], -1)
        grids = [tokens._replace(valid=None) for tokens in (inputs.grid, inputs.key_grid)]
        _, _, *around = layout(*grids, query.device)
        flat = F.pad(offset_table(inputs).float().flatten(1) / inputs.scale, around)
        operands = Operands(query, key, value, valid, flat)
        launch = Launch(operands, *grids, inputs.scale)
        out = new_tokens(query, value.shape[-1])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        launch.run(joint_forward, (out,), (lse,))
        ctx.launch, ctx.bucketing = launch._replace(operands=None), inputs.terms.bucketing
        ctx.save_for_backward(*operands, table, out, lse)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("triton", grad)
        *operands, table, out, lse = ctx.saved_tensors
        launch = ctx.launch._replace(operands=Operands(*operands))
        query, key, value = operands[:3]
        grad = with_unit_stride(grad.to(query.dtype))
        grad_query, grad_key, grad_value = (new_tokens(tensor, tensor.shape[-1]) for tensor in (query, key, value))
        means = torch.empty_like(lse)
        launch.run(joint_backward_queries, (grad, out, grad_query), (lse, means))
        launch.run(joint_backward_keys, (grad, grad_key, grad_value), (lse, means))
        grad_table = None
        if ctx.needs_input_grad[4]:
            # Users may call backward inside of autocast, but forward ran without autocast, so switch it off here, too.
            with without_autocast(grad.device):
                sums, tile = launch.sums(grad, lse, means)
                grad_table = by_entry(sums, table, launch.grid, launch.key_grid, tile, ctx.bucketing)
        return None, grad_query, grad_key, grad_value, grad_table


def joint_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention with a joint bias between grids without `coords`; `triton.refusal` has let `inputs` pass."""
    vectors = (inputs.query, inputs.key)
    if (width := inputs.query.shape[-1]) % 8:
        # With free channels (`RelativeTerms.channels`), as in BEiT, the width may not be a multiple of 8. A GPU would
        # load such vectors in small pieces, so fill queries and keys up with zeros. Tensor Cores take 16 channels at a
        # time, so fill up to a multiple of 16 rather than 8, which costs no further product.
        vectors = (F.pad(tensor, (0, -width % 16)) for tensor in vectors)
    return JointAttention.apply(inputs, *vectors, inputs.value, inputs.terms.bias.table)
