"""Compile the kernels of 'triton' without a GPU, and count registers and instructions: `python tools/gpu/kernels.py`.

For sm_80, sm_86 and sm_90 the table has, per kernel: registers, bytes of spilled registers and of shared memory, and
how many tensor-core instructions and how many instructions in total a warp needs for one tile of the main loop, each
beside the number of the same kernel without terms. Kernels for a joint bias have no such second number.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relvit.ops.backends.triton.backward import backward_keys, backward_queries
from relvit.ops.backends.triton.forward import forward
from relvit.ops.backends.triton.joint import joint_launch as joint
from relvit.ops.backends.triton.joint.offsets import layout
from relvit.ops.backends.triton.launch import Variant, constants
from relvit.ops.grid import Grid, num_tokens

KERNELS = (forward, backward_queries, backward_keys)
JOINT_KERNELS = (
    joint.joint_forward,
    joint.joint_backward_queries,
    joint.joint_backward_keys,
    joint.joint_backward_table,
)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of shared memory that a block may use (CUDA C++ programming guide, table of compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
HEADS, HEAD_DIM = 6, 64
# This is the number of rows of tables with the default clip distance, 7: a zero row, and 15 rows for each axis, padded
# to a multiple of 8.
ENTRIES = 32
POINTERS = {"valid": "*u8"} | dict.fromkeys(("key_index", "key_bounds", "value_index", "value_bounds"), "*i16")
POINTERS |= dict.fromkeys(("bias", "table", "lse", "means", "sums"), "*fp32")
POINTERS |= dict.fromkeys(("query_places", "key_places"), "*i32")
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


class Code(NamedTuple):
    """What a compiled kernel needs; `tensor` and `issued` are instructions of a warp for one tile of the main loop."""

    registers: int
    spilled: int
    shared: int
    tensor: int
    issued: int
    named: dict[str, Any]


def compiled(
    kernel: Any,
    arch: int,
    size: tuple[int, int],
    *,
    terms: bool = True,
    dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    padded: bool = False,
    entries: tuple[int, int] = (ENTRIES, ENTRIES),
    batch: int = 4,
) -> Code:
    """Compile a kernel for an architecture and a key grid, and read its machine code.

    `entries` are the numbers of entries in the tables for logits and for values; a number of 0 leaves the table out.
    """
    height, width = size if terms else (size[0] * size[1], 1)
    variant = Variant((dim, dim, dim), (entries[0] * terms, entries[1] * terms), "query" * terms, False, True, padded)
    named, options = constants(kernel, dtype, (height, width), variant, arch == 90)
    length = size[0] * size[1]
    values = {"work": batch * HEADS * length, "heads": HEADS, "length": length, "batched": 0, "prefix": 0, "first": 0}
    values |= {"height": height, "width": width, "valid_batch": length}
    return compiled_with(kernel, arch, dtype, dim, values, named, options)


def compiled_joint(
    kernel: Any,
    arch: int,
    grid: Grid,
    *,
    dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM),
    dtype: torch.dtype = torch.bfloat16,
    padded: bool = False,
    batch: int = 4,
) -> Code:
    """Compile a kernel for a joint bias on a raster with vectors as wide as `dims`, queries' and values'."""
    named, options = joint.constants(kernel, dtype, dims, grid, grid, padded, arch == 90)
    length, (_, _, before, behind) = num_tokens(grid), layout(grid, grid, torch.device("cpu"))
    offsets = (2 * grid.height - 1) * (2 * grid.width - 1)
    values = {"heads": HEADS, "length": length, "keys": length, "entries": before + offsets + behind, "first": before}
    values |= {"samples": batch, "splits": 1, "valid_batch": length}
    for side in ("", "key_"):
        values |= dict(zip((f"{side}height", f"{side}width", f"{side}prefix"), grid[:3], strict=True))
    return compiled_with(kernel, arch, dtype, math.gcd(*dims), values, named, options)


def compiled_with(
    kernel: Any,
    arch: int,
    dtype: torch.dtype,
    stride: int,
    values: dict[str, int],
    named: dict[str, Any],
    options: dict[str, int],
) -> Code:
    """Compile a kernel with given constants, and read its machine code.

    Args:
        kernel: the kernel, whose parameters are recognised by their names.
        arch: the architecture, such as 90 for sm_90.
        dtype: the dtype of queries, keys and values.
        stride: a number of which all strides of queries, keys and values are multiples.
        values: the values of integer parameters that are no strides.
        named: the constants, by the names of the parameters.
        options: the options of the compilation.
    """
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in named:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in values or re.fullmatch(r"\w+_(batch|head|token)", name):
            signature[name] = "i32"
            # As at a call, Triton may use that a number is a multiple of 16.
            if values.get(name, stride) % 16 == 0:
                attributes[(place,)] = ALIGNED
        else:
            # The logits of the forward kernel are float32 in its workspace.
            single = kernel is forward and name == "logits"
            signature[name] = "*fp32" if single else POINTERS.get(name, NAMES[dtype])
            attributes[(place,)] = ALIGNED
    source = ASTSource(kernel, signature, named, attributes)
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage, sass = (disassembled(option, file.name) for option in ("-res-usage", "-sass"))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Code(registers, stack, code.metadata.shared, *instructions(sass), named)


def disassembled(option: str, path: str) -> str:
    """Run cuobjdump, which comes with Triton."""
    run = subprocess.run([TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True)
    return run.stdout


def instructions(sass: str) -> tuple[int, int]:
    """Count a warp's instructions for one tile of the main loop: on tensor cores, and all.

    The main loop is the last innermost loop with the most exponentials: an earlier loop is for prefix tokens, which the
    grids here lack.
    """
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*?);"
    lines = [(int(place, 16), name, rest) for place, name, rest in re.findall(pattern, sass)]
    targets = [(place, re.search(r"0x([0-9a-f]+)", rest)) for place, name, rest in lines if name.startswith("BRA")]
    loops = [(int(target[1], 16), place) for place, target in targets if target and int(target[1], 16) < place]
    candidates = []
    for begin, end in loops:
        # An innermost loop contains no loop but itself.
        if sum(begin <= first and last <= end for first, last in loops) == 1:
            names = [name for place, name, _ in lines if begin <= place <= end]
            candidates.append((sum("EX2" in name for name in names), begin, end, names))
    *_, main = max(candidates)
    return sum("MMA" in name for name in main), len(main)


def tiles_per_head(kernel: Any, code: Code, size: tuple[int, int], terms: bool) -> int:
    """Count the tiles that all blocks of one head go through."""
    tokens = size[0] * size[1]
    height, width = size if terms else (tokens, 1)
    keys = -(-height // code.named["ROWS"]) * -(-width // code.named["COLS"])
    return keys * -(-tokens // code.named["BLOCK_M"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, count and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--size", type=int, nargs="+", default=[224, 512, 1024], help="image sides, patches of 16")
    given = parser.parse_args(arguments)
    head = ("kernel", "head_dim", "patches", "sm", "registers", "spilled", "shared", "tensor (off)", "issued (off)")
    print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    for side, arch, kernel in itertools.product(given.size, SHARED_LIMIT, KERNELS):
        size = (side // 16, side // 16)
        on, off = (compiled(kernel, arch, size, terms=terms) for terms in (True, False))
        tiles = tiles_per_head(kernel, on, size, True), tiles_per_head(kernel, off, size, False)
        cells = [kernel.__name__, HEAD_DIM, f"{size[0]}x{size[1]}", arch, on.registers, on.spilled, on.shared]
        cells += [f"{on.tensor} ({off.tensor}), times {tiles[0]} ({tiles[1]}) tiles", f"{on.issued} ({off.issued})"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for side, arch, kernel in itertools.product(given.size, SHARED_LIMIT, JOINT_KERNELS):
        grid = Grid(side // 16, side // 16, 1)
        code = compiled_joint(kernel, arch, grid)
        cells = [kernel.__name__, HEAD_DIM, f"{grid.height}x{grid.width}", arch, code.registers, code.spilled]
        print(f"| {' | '.join(map(str, (*cells, code.shared, code.tensor, code.issued)))} |", flush=True)


if __name__ == "__main__":
    main()
