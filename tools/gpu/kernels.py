"""Compile the kernels of the backend 'triton' without a GPU and estimate their cost: `python tools/gpu/kernels.py`.

For sm_80, sm_86 and sm_90 the first table has, per kernel: registers, bytes of spilled registers, shared memory, and of
one tile of its main loop the tensor-core instructions, all instructions of a warp and the bytes loaded, and a warp's
instructions outside that loop for one block, each beside the same kernel with the terms switched off.

The second table is an ESTIMATE by roofline for A100 and H100; nothing here has been measured: of each kernel the
slowest of tensor cores, issue slots, exponentials, L2 and main memory, as if it overlapped all others; what a kernel
does before and after its main loop is included, with terms and without. Of its columns 'kernels' leaves out what
PyTorch computes around them, 'all' adds these passes.
"""

from __future__ import annotations

import argparse
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
from relvit.ops.backends.triton.launch import Variant, constants
from relvit.ops.backends.triton.table_products import SPAN

KERNELS = (forward, backward_queries, backward_keys)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of shared memory that a block may have, by the CUDA C++ programming guide, table of compute capabilities.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
HEADS = 6
# Of tables with the default clip distance, 7: a zero row, and 15 for each axis, up to a multiple of 8.
ENTRIES = 32
POINTERS = {"valid": "*u8"} | dict.fromkeys(("key_index", "key_bounds", "value_index", "value_bounds"), "*i16")
POINTERS |= dict.fromkeys(("bias", "lse", "means", "sums"), "*fp32")
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


class GPU(NamedTuple):
    """Ceilings of a GPU, by its data sheet: per cycle and multiprocessor, but for the main memory's bytes a second."""

    arch: int
    processors: int
    hertz: float
    flops: int
    exponentials: int
    l2_bytes: int
    memory: float


GPUS = {
    "A100": GPU(80, 108, 1.41e9, 2048, 16, 64, 2.0e12),
    "H100": GPU(90, 132, 1.755e9, 4096, 16, 64, 3.35e12),
}


class Code(NamedTuple):
    """What a compiled kernel needs; `tensor` and `issued` are instructions of a warp for one tile of the main loop.

    `outside` are its other instructions for one block of queries (of keys, in `backward_keys`).
    """

    registers: int
    spilled: int
    shared: int
    tensor: int
    issued: int
    outside: int
    warps: int
    named: dict[str, Any]


def compiled(
    kernel: Any,
    arch: int,
    size: tuple[int, int],
    *,
    terms: bool = True,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    padded: bool = False,
    save: bool = True,
) -> Code:
    """Compile a kernel for an architecture and a key grid, and read its machine code."""
    height, width = size if terms else (size[0] * size[1], 1)
    variant = Variant((dim, dim, dim), (ENTRIES * terms,) * 2, "query" * terms, False, save, padded)
    named, options = constants(kernel, dtype, (height, width), variant, arch == 90)
    length = size[0] * size[1]
    values = {"work": 4 * HEADS * length, "heads": HEADS, "length": length, "batched": 0, "prefix": 0, "first": 0}
    values |= {"height": height, "width": width, "valid_batch": length}
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in named:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in values or re.fullmatch(r"\w+_(batch|head|token)", name):
            signature[name] = "i32"
            # As when called: strides of queries, keys and values are multiples of the head dimension.
            if values.get(name, dim) % 16 == 0:
                attributes[(place,)] = ALIGNED
        else:
            # The forward's logits are in its workspace.
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
    counts = instructions(sass, -(-width // named["COLS"]), -(-(height + width) // SPAN.value))
    return Code(registers, stack, code.metadata.shared, *counts, options["num_warps"], named)


def disassembled(option: str, path: str) -> str:
    """Run cuobjdump, which comes with Triton."""
    run = subprocess.run([TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True)
    return run.stdout


def instructions(sass: str, strips: int, spans: int) -> tuple[int, int, int]:
    """Count a warp's instructions: on tensor cores for one tile of the main loop, all for it, all others for a block.

    The main loop is the last innermost one with the most exponentials. An earlier one with exponentials is for prefix
    tokens, of which there are none here; the others are over rows and columns, `spans` times. What is around the main
    loop in the next larger one is for each strip of columns.
    """
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*?);"
    lines = [(int(place, 16), name, rest) for place, name, rest in re.findall(pattern, sass)]
    targets = [(place, re.search(r"0x([0-9a-f]+)", rest)) for place, name, rest in lines if name.startswith("BRA")]
    loops = [(int(target[1], 16), place) for place, target in targets if target and int(target[1], 16) < place]

    def names(loop: tuple[int, int]) -> list[str]:
        return [name for place, name, _ in lines if loop[0] <= place <= loop[1]]

    def exponentials(loop: tuple[int, int]) -> int:
        return sum("EX2" in name for name in names(loop))

    def inside(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and other[0] <= one[0] and one[1] <= other[1]

    inner = [loop for loop in loops if not any(inside(other, loop) for other in loops)]
    main = max(sorted(inner), key=lambda loop: (exponentials(loop), loop))
    times = dict.fromkeys(range(len(lines)), 1)
    around = min((loop for loop in loops if inside(main, loop)), key=lambda loop: loop[1] - loop[0], default=None)
    weights = [(around, strips)] if around else []
    weights += [(loop, 0 if loop < main and exponentials(loop) else spans) for loop in inner]
    weights += [(main, 0)]
    for (begin, end), number in weights:
        times |= {index: number for index, (place, _, _) in enumerate(lines) if begin <= place <= end}
    return sum("MMA" in name for name in names(main)), len(names(main)), sum(times.values())


def tile_bytes(kernel: Any, code: Code, dim: int, terms: bool) -> int:
    """Count the bytes that a tile of the main loop loads and stores, half precision but for the workspace."""
    named = code.named
    queries, rows, cols = named["BLOCK_M"], named["ROWS"], named["COLS"]
    if kernel is backward_keys:
        return queries * (2 * 2 * dim + 8 + terms * (rows + cols) * (2 + 2))
    stored = 4 * (1 + named["STRIPS"])
    return rows * cols * 2 * 2 * dim + terms * queries * rows * (4 + stored)


def block_bytes(kernel: Any, code: Code, size: tuple[int, int], dim: int, terms: bool) -> int:
    """Count the bytes that a block of queries loads and stores outside the main loop."""
    queries, axes = code.named["BLOCK_M"], sum(size)
    if kernel is backward_keys or not terms:
        return 4 * 2 * dim * queries
    # Index and products of each table; sums and running sums; bounds, running sums and their differences.
    tables = 1 if kernel is forward else 2
    of_query = 6 * 2 * dim + axes * (tables * (2 + 4) + 4 + 2 * 4) + ENTRIES * (2 * 2 + 2 * 4 + 2)
    return queries * of_query + (1 + tables) * ENTRIES * 2 * dim


def tiles_per_head(kernel: Any, code: Code, size: tuple[int, int], terms: bool) -> int:
    """Count the tiles that all blocks of one head go through."""
    tokens = size[0] * size[1]
    height, width = size if terms else (tokens, 1)
    keys = -(-height // code.named["ROWS"]) * -(-width // code.named["COLS"])
    return keys * -(-tokens // code.named["BLOCK_M"])


def estimate(
    kernel: Any, gpu: GPU, size: tuple[int, int], terms: bool, save: bool, dim: int = 64, wider: float = 1.0
) -> float:
    """Estimate the seconds of a kernel for one head by its slowest resource.

    `save`: forward leaves what backward wants; `wider`: as many times the channels.
    """
    code = compiled(kernel, gpu.arch, size, terms=terms, dim=dim, save=save)
    pairs = code.named["BLOCK_M"] * code.named["ROWS"] * code.named["COLS"]
    products, of_tables = {"forward": (2, 2), "backward_queries": (3, 3), "backward_keys": (4, 0)}[kernel.__name__]
    tokens, axes, tiles = size[0] * size[1], sum(size), tiles_per_head(kernel, code, size, terms)
    blocks = -(-tokens // code.named["BLOCK_M"])
    if kernel is backward_keys:
        blocks = tiles // blocks
    of_block = 2 * of_tables * terms * code.named["BLOCK_M"] * ENTRIES * dim
    cycles = max(
        (tiles * 2 * products * pairs * dim * wider + blocks * of_block) / gpu.flops,
        (tiles * code.issued + blocks * code.outside) * code.warps / 4,
        tiles * pairs / gpu.exponentials,
        (tiles * tile_bytes(kernel, code, dim, terms) + blocks * block_bytes(kernel, code, size, dim, terms))
        * wider
        / gpu.l2_bytes,
    )
    vectors, numbers = {"forward": (4, 1), "backward_queries": (6, 2), "backward_keys": (6, 2)}[kernel.__name__]
    # Workspaces stay in L2. Sums by entry for backward; what is looked up per row and column, written, then read.
    of_terms = {"forward": save * ENTRIES, "backward_queries": 2 * axes + ENTRIES, "backward_keys": 2 * axes}
    moved = tokens * (vectors * 2 * dim * wider + 4 * numbers + terms * 2 * of_terms[kernel.__name__])
    return max(cycles / (gpu.processors * gpu.hertz), moved / gpu.memory)


def over_tokens(gpu: GPU, size: tuple[int, int], dim: int = 64) -> float:
    """Estimate the seconds of PyTorch's products over all tokens of one head, the gradients of both tables."""
    return size[0] * size[1] * 2 * 2 * (ENTRIES + dim) / gpu.memory


def passes_of_fused(gpu: GPU, size: tuple[int, int], dim: int = 64) -> float:
    """Estimate the seconds of PyTorch's passes around `fused` for one head: logits and marginals by table entry."""
    axes = sum(size)
    # Read queries, write and read logits per entry, write those per axis; read marginals, write and read sums per
    # entry, read the kernel's result, write and read the value term, write the result.
    moved = 2 * dim + 4 * ENTRIES + 2 * axes + 4 * axes + 8 * ENTRIES + (4 + 8 + 2) * dim
    return size[0] * size[1] * moved / gpu.memory


def augmented(gpu: GPU, size: tuple[int, int], dim: int = 64) -> tuple[float, float]:
    """Return how much wider the vectors of `fused` are, and the seconds that it takes to augment those of one head."""
    width = -(-(dim + sum(size)) // 8) * 8
    return width / dim, size[0] * size[1] * 2 * 4 * (dim + 2 * width) / gpu.memory


def print_codes(sizes: Sequence[int], dims: Sequence[int]) -> None:
    """Print the table of compiled kernels."""
    print(
        "| kernel | head_dim | patches | sm | registers | spilled | shared "
        "| tensor (off) | issued (off) | outside (off) | bytes (off) |"
    )
    print("|---" * 11 + "|")
    for dim in dims:
        for side in sizes:
            size = (side // 16, side // 16)
            for arch in SHARED_LIMIT:
                for kernel in KERNELS:
                    on, off = (compiled(kernel, arch, size, terms=terms, dim=dim) for terms in (True, False))
                    tiles = [tiles_per_head(kernel, code, size, terms) for code, terms in ((on, True), (off, False))]
                    loaded = [tile_bytes(kernel, code, dim, terms) for code, terms in ((on, True), (off, False))]
                    print(
                        f"| {kernel.__name__} | {dim} | {size[0]}x{size[1]} | {arch} | {on.registers} | {on.spilled} | "
                        f"{on.shared} | {on.tensor} ({off.tensor}), times {tiles[0]} ({tiles[1]}) tiles | {on.issued} "
                        f"({off.issued}) | {on.outside} ({off.outside}) | {loaded[0]} ({loaded[1]}) |",
                        flush=True,
                    )


def print_estimates(sizes: Sequence[int]) -> None:
    """Print the estimated times beside those of the same kernels without terms."""
    print("\nESTIMATE, not measured: times of kernels without terms at head_dim 64, bfloat16\n")
    print("| GPU | image | pass | microseconds per head without terms | kernels | all | fused |")
    print("|---" * 7 + "|")
    for name, gpu in GPUS.items():
        for side in sizes:
            size = (side // 16, side // 16)
            width, augmenting = augmented(gpu, size)
            for training, kernels in ((False, KERNELS[:1]), (True, KERNELS)):
                off, on, wide = (
                    sum(estimate(kernel, gpu, size, terms, training, wider=wider) for kernel in kernels)
                    for terms, wider in ((False, 1.0), (True, 1.0), (False, width))
                )
                whole = on + training * over_tokens(gpu, size)
                fused = wide + (2.5 if training else 1.0) * (augmenting + passes_of_fused(gpu, size))
                print(
                    f"| {name} | {side} | {'step' if training else 'forward'} | {1e6 * off:.3f} | {on / off:.2f} | "
                    f"{whole / off:.2f} | {fused / off:.2f} |",
                    flush=True,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, count and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--size", type=int, nargs="+", default=[224, 512, 1024], help="image sides, patches of 16")
    parser.add_argument("--head_dim", type=int, nargs="+", default=[64], help="for the first table")
    given = parser.parse_args(arguments)
    print_codes(given.size, given.head_dim)
    print_estimates(given.size)


if __name__ == "__main__":
    main()
