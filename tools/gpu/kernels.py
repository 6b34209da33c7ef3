"""Compile the kernels of the backend 'triton' without a GPU and estimate their cost: `python tools/gpu/kernels.py`.

For sm_80, sm_86 and sm_90 the first table has, per kernel: registers, bytes of spilled registers, shared memory, and of
one tile of its main loop the tensor-core instructions, all instructions of a warp and the bytes loaded, each beside the
same kernel with the terms switched off. The second table is an ESTIMATE by roofline for A100 and H100; nothing here has
been measured: of each kernel the slowest of tensor cores, issue slots, exponentials, L2 and main memory, as if it
overlapped all others. Of its columns 'kernels' leaves out what PyTorch computes around them, 'all' adds these passes.
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

KERNELS = (forward, backward_queries, backward_keys)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of shared memory that a block may have, by the CUDA C++ programming guide, table of compute capabilities.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
HEADS = 6
# Of tables with the default clip distance, 7: a zero row, and 15 for each axis, up to a multiple of 8.
ENTRIES = 32
POINTERS = {"valid": "*u8"} | dict.fromkeys(("key_index", "key_bounds", "value_index", "value_bounds"), "*i16")
POINTERS |= dict.fromkeys(("bias", "lse", "means", "sums", "grad_table", "grad_bias", "grad_value_table"), "*fp32")
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
    """What a compiled kernel needs; `tensor` and `issued` are instructions of a warp for one tile of the main loop."""

    registers: int
    spilled: int
    shared: int
    tensor: int
    issued: int
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
            signature[name] = POINTERS.get(name, NAMES[dtype])
            attributes[(place,)] = ALIGNED
    source = ASTSource(kernel, signature, named, attributes)
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage, sass = (disassembled(option, file.name) for option in ("-res-usage", "-sass"))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    tensor, issued = main_loop(sass)
    return Code(registers, stack, code.metadata.shared, tensor, issued, options["num_warps"], named)


def disassembled(option: str, path: str) -> str:
    """Run cuobjdump, which comes with Triton."""
    run = subprocess.run([TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True)
    return run.stdout


def main_loop(sass: str) -> tuple[int, int]:
    """Count tensor-core and all instructions of the last innermost loop that has the former: earlier is the prefix."""
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*?);"
    lines = [(int(place, 16), name, rest) for place, name, rest in re.findall(pattern, sass)]
    targets = [(place, re.search(r"0x([0-9a-f]+)", rest)) for place, name, rest in lines if name.startswith("BRA")]
    loops = [(int(target[1], 16), place) for place, target in targets if target and int(target[1], 16) < place]
    counts = []
    for begin, end in loops:
        if not any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in loops):
            names = [name for place, name, _ in lines if begin <= place <= end]
            counts.append((sum("MMA" in name for name in names), len(names)))
    # Products in float32 are on no tensor core.
    return ([count for count in counts if count[0]] or [(0, len(lines))])[-1]


def tile_bytes(kernel: Any, code: Code, dim: int, terms: bool) -> int:
    """Count the bytes that a tile of the main loop loads and stores, half precision but for marginals and gradients."""
    named = code.named
    queries, rows, cols = named["BLOCK_M"], named["ROWS"], named["COLS"]
    if kernel is backward_keys:
        return queries * (2 * 2 * dim + 8 + terms * (rows + cols) * (2 + 4))
    stored = 4 * (1 + named["STRIPS"])
    of_rows = 2 + stored + (4 if kernel is backward_queries else 0)
    return rows * cols * 2 * 2 * dim + terms * queries * rows * of_rows


def tiles_per_head(kernel: Any, code: Code, size: tuple[int, int], terms: bool) -> int:
    """Count the tiles that all blocks of one head go through."""
    tokens = size[0] * size[1]
    height, width = size if terms else (tokens, 1)
    keys = -(-height // code.named["ROWS"]) * -(-width // code.named["COLS"])
    return keys * -(-tokens // code.named["BLOCK_M"])


def estimate(kernel: Any, gpu: GPU, size: tuple[int, int], terms: bool, dim: int = 64, wider: float = 1.0) -> float:
    """Estimate the seconds of a kernel for one head by its slowest resource; `wider`: as many channels per head."""
    code = compiled(kernel, gpu.arch, size, terms=terms, dim=dim)
    pairs = code.named["BLOCK_M"] * code.named["ROWS"] * code.named["COLS"]
    products = {"forward": 2, "backward_queries": 3, "backward_keys": 4}[kernel.__name__]
    cycles = max(
        2 * products * pairs * dim * wider / gpu.flops,
        code.issued * code.warps / 4,
        pairs / gpu.exponentials,
        tile_bytes(kernel, code, dim, terms) * wider / gpu.l2_bytes,
    )
    tokens, axes = size[0] * size[1], sum(size)
    vectors, numbers = {"forward": (4, 1), "backward_queries": (5, 2), "backward_keys": (6, 2)}[kernel.__name__]
    # Logits in half, their gradients, marginals and the gradients of those in single precision.
    of_axes = {"forward": 2 + 4, "backward_queries": 2 + 4 + 4, "backward_keys": 2 + 4}[kernel.__name__]
    # With a value term the result is in single precision.
    of_result = 2 * dim if terms and kernel is forward else 0
    moved = tokens * (vectors * 2 * dim * wider + of_result + 4 * numbers + terms * axes * of_axes)
    computed = tiles_per_head(kernel, code, size, terms) * cycles / (gpu.processors * gpu.hertz)
    return max(computed, moved / gpu.memory)


def around(gpu: GPU, size: tuple[int, int], training: bool, dim: int = 64, entries: int = 32) -> float:
    """Estimate the seconds of PyTorch's passes for one head: logits by table entry, marginals by table entry."""
    axes = sum(size)
    # Read queries, write and read logits per entry, write those per axis; read marginals, write and read sums per
    # entry, read the kernel's result, write and read the value term, write the result.
    moved = 2 * dim + 4 * entries + 2 * axes + 4 * axes + 8 * entries + (4 + 8 + 2) * dim
    # The same backwards, the casts of gradients, and D from result and marginals.
    return size[0] * size[1] * moved * (2.5 if training else 1.0) / gpu.memory


def augmented(gpu: GPU, size: tuple[int, int], dim: int = 64) -> tuple[float, float]:
    """Return how much wider the vectors of `fused` are, and the seconds that it takes to augment those of one head."""
    width = -(-(dim + sum(size)) // 8) * 8
    return width / dim, size[0] * size[1] * 2 * 4 * (dim + 2 * width) / gpu.memory


def print_codes(sizes: Sequence[int], dims: Sequence[int]) -> None:
    """Print the table of compiled kernels."""
    print(
        "| kernel | head_dim | patches | sm | registers | spilled | shared "
        "| tensor (off) | issued (off) | bytes (off) |"
    )
    print("|---" * 10 + "|")
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
                        f"({off.issued}) | {loaded[0]} ({loaded[1]}) |",
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
                    sum(estimate(kernel, gpu, size, terms, wider=wider) for kernel in kernels)
                    for terms, wider in ((False, 1.0), (True, 1.0), (False, width))
                )
                whole = on + around(gpu, size, training)
                fused = wide + (2.5 if training else 1.0) * (augmenting + around(gpu, size, False))
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
