"""Measure where LSH attention becomes quicker than fused attention to all tokens: a table in Markdown.

    python tools/depth/lsh.py                  # 256 to 16,384 tokens of 6 heads of 64, with a bias by offset
    python tools/depth/lsh.py --sides 16 32

Processor time of one thread, medians of rounds in which all take turns, forward alone and with backward; and what is
kept for backward, of which tensors that share memory count once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from relvit.families.reformer import lsh_attention, lsh_rotations
from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_attention

HEADS, HEAD_DIM, BUCKET = 6, 64, 32
ROUNDS = (1, 2, 4)


def operations(side: int) -> tuple[dict[str, Callable[[Tensor, Tensor], Tensor]], list[Tensor]]:
    """Return what takes turns, by name, and its two inputs."""
    grid, generator = make_grid(side, side), torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, HEADS, side * side, HEAD_DIM, generator=generator, requires_grad=True) for _ in range(2)]
    terms = RelativeTerms(bias=AxisTables(torch.randn(HEADS, 15), torch.randn(HEADS, 15)))

    def hashed(rounds: int) -> Callable[[Tensor, Tensor], Tensor]:
        rotations = lsh_rotations(rounds, HEAD_DIM, max(1, side * side // BUCKET // 2 * 2), generator)
        return lambda q, v: lsh_attention(q, v, grid, rotations, terms=terms)

    made = {f"LSH, {rounds} round{'s' * (rounds > 1)}": hashed(rounds) for rounds in ROUNDS}
    return {"all": lambda q, v: relative_attention(q, q, v, terms, grid)} | made, inputs


def kept(operation: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Return the bytes that autograd keeps, besides the inputs."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = operation(*inputs)
    for tensor in inputs:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(found.values())


def seconds(side: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Measure forward, and forward with backward, in processor seconds."""
    made, inputs = operations(side)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in made}
    for _ in range(repeats + 1):
        for name, operation in made.items():
            begin = time.process_time()
            with torch.no_grad():
                operation(*inputs)
            between = time.process_time()
            torch.autograd.grad(operation(*inputs).sum(), inputs)
            times[name][0].append(between - begin)
            times[name][1].append(time.process_time() - between)
    # The first round warms up.
    return {name: tuple(statistics.median(each[1:]) for each in both) for name, both in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", type=int, default=[14, 32, 64, 96, 128], help="rows of a square grid")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = ["all", *(f"LSH, {rounds} round{'s' * (rounds > 1)}" for rounds in ROUNDS)]
    print("| tokens | " + " | ".join(f"{name}: forward, training, s; kept, MB" for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for side in given.sides:
        found = seconds(side, given.repeats)
        made, inputs = operations(side)
        cells = [
            f"{forward:.3f}, {training:.3f}; {kept(made[name], inputs) / 1e6:.0f}"
            for name, (forward, training) in found.items()
        ]
        print(f"| {side * side:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
