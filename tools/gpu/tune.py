"""Time the kernels of the backend 'triton' by sizes of tiles: `python tools/gpu/tune.py --minutes 3`.

For each kernel, at 64 x 64, 32 x 32 and 14 x 14 patches in bfloat16, the tool tries numbers of queries and keys in a
tile, warps, stages, and tiles of few rows (`Blocks` of `relvit.ops.backends.triton.launch`). The sizes that the package
takes now come first, and the grids take turns. Parallel processes compile the kernels in the first half of the time.
Then each kernel is checked against float64, forward and backward, and timed alone, without the processor's share. At
the end the tool prints the fastest sizes for each grid, and the lines of the table `BLOCKS` for this architecture.
`--toy` does the same in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if "--toy" in sys.argv:
    # The variable has an effect only if it is set before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from torch import Tensor

from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_attention
from relvit.ops.backends.triton import launch
from relvit.ops.backends.triton.launch import Blocks, Launch

KERNELS = ("forward", "backward_queries", "backward_keys")
# The error may be this many times the error of `fused`, because the two backends round at different places.
TIMES_FUSED = 3
# The number of accumulator elements that a thread may hold.
MOST_PER_THREAD = 64


class Case(NamedTuple):
    """The patches on each side, sizes of the tensors, the dtype, and the clip distance."""

    height: int
    width: int
    batch: int
    heads: int = 6
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    distance: int = 7


class Trial(NamedTuple):
    """A kernel and the sizes of its tiles in a case."""

    case: Case
    kernel: str
    blocks: Blocks


CASES = (Case(64, 64, 4), Case(32, 32, 16), Case(14, 14, 64))
TOY_CASES = (Case(2, 18, 1, 1, 16, torch.float16, 2),)


def drawn(case: Case, device: str, dtype: torch.dtype) -> tuple[list[Tensor], RelativeTerms]:
    """Return leaves (queries, keys, values, tables) and terms of keys and values, with the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, case.batch, case.height * case.width, case.heads, case.dim)
    contents = torch.randn(shape, generator=generator).transpose(2, 3)
    tables = 0.3 * torch.randn(4, 2 * case.distance + 1, case.dim, generator=generator)
    rounded = [tensor.to(case.dtype).to(device, dtype).requires_grad_() for tensor in (*contents, *tables)]
    return rounded, RelativeTerms(key=AxisTables(*rounded[3:5]), value=AxisTables(*rounded[5:]))


def outcome(case: Case, device: str, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the result and all gradients."""
    leaves, terms = drawn(case, device, dtype)
    out = relative_attention(*leaves[:3], terms, make_grid(case.height, case.width), backend=backend)
    cotangent = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return the relative errors; infinity for results that are not finite."""
    ratios = (float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))
    return [ratio if math.isfinite(ratio) else math.inf for ratio in ratios]


def key_of(kernel: str, dim: int, device: str) -> tuple[str, bool, bool]:
    """Return the key of the package's table for this GPU."""
    return kernel, dim > 64, device == "cuda" and torch.cuda.get_device_capability()[0] == 9


@contextmanager
def taken(trial: Trial, device: str, alone: bool = False) -> Iterator[list[tuple[Any, ...]]]:
    """Make the package take a trial's tiles; yield the list of its kernel's launches, with their arguments.

    With `alone` no other kernel runs, so results are wrong.
    """
    launches: list[tuple[Any, ...]] = []
    run = Launch.run

    def recorded(self: Launch, *arguments: Any) -> None:
        if tried := self.kernel.__name__ == trial.kernel:
            launches.append((self, *arguments))
        if tried or not alone:
            run(self, *arguments)

    launch.constants.cache_clear()
    change = {key_of(trial.kernel, trial.case.dim, device): trial.blocks}
    with mock.patch.dict(launch.BLOCKS, change), mock.patch.object(Launch, "run", recorded):
        yield launches
    launch.constants.cache_clear()


def build(trial: Trial, device: str) -> None:
    """Compile in a process of a pool, which leaves the machine code in Triton's cache on the disk."""
    # Otherwise every process would first compile the other kernels, too.
    with taken(trial, device, alone=True):
        outcome(trial.case, device, "triton", trial.case.dtype)


def milliseconds(call: tuple[Any, ...], device: str) -> float:
    """Time a launch; on a GPU in a graph, so that the processor's work does not count."""
    this, *arguments = call
    if device == "cuda":
        return triton.testing.do_bench_cudagraph(lambda: this.run(*arguments), rep=30, return_mode="median")
    begin = time.perf_counter()
    this.run(*arguments)
    return 1000 * (time.perf_counter() - begin)


def measured(trial: Trial, device: str, exact: Sequence[Tensor], allowed: float) -> dict[str, Any]:
    """Check a trial and time it; an error is its status."""
    try:
        with taken(trial, device) as launches:
            worst = max(errors(outcome(trial.case, device, "triton", trial.case.dtype), exact))
            # `errors` has turned NaN into infinity.
            status = "ok" if worst <= allowed else "wrong"
            took = milliseconds(launches[0], device) if status == "ok" else None
        # JSON has no infinity.
        worst = worst if worst < math.inf else None
    except Exception as raised:
        status, took, worst = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0][:150]}", None, None
    return {"status": status, "ms": took, "error": worst}


def same_shape(blocks: Blocks, height: int, width: int) -> bool:
    """Return whether a tile of few rows has the same shape as any other tile, as on a narrow grid."""
    return launch.row_shape(blocks.keys, height, width) == launch.tile_shape(blocks.keys, height, width)


def trials(cases: Sequence[Case], device: str, toy: bool) -> list[Trial]:
    """Return all trials, the package's own tiles first; grids take turns, so that a short time covers all grids."""
    sizes = itertools.product((128, 64), (64, 32, 128, 16), (8, 4), (2, 3), (True, False))
    every = [Blocks(*size) for size in sizes if size[0] * size[1] <= MOST_PER_THREAD * 32 * size[2]]
    if toy:
        every = [Blocks(16, 32, 4, 1, True), Blocks(16, 16, 4, 1)]
    pairs = itertools.product(KERNELS, cases)
    own = {(kernel, case): launch.BLOCKS[key_of(kernel, case.dim, device)] for kernel, case in pairs}
    found = [] if toy else [Trial(case, kernel, blocks) for (kernel, case), blocks in own.items()]
    for blocks, (kernel, case) in itertools.product(every, own):
        if blocks != own[kernel, case] and not (blocks.by_row and same_shape(blocks, *case[:2])):
            found.append(Trial(case, kernel, blocks))
    return found


def compile_all(every: Sequence[Trial], device: str, end: float) -> None:
    """Compile until a given time, in parallel processes on all cores but two."""
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(build, trial, device) for trial in every]
        done, late = wait(futures, timeout=max(0.0, end - time.monotonic()))
        for process in list(pool._processes.values()) if late else ():
            # A process that still compiles would disturb the timing.
            process.terminate()
    print(f"compiled {len(done)} of {len(every)} trials", flush=True)


def fastest(rows: Sequence[dict[str, Any]], dim: int, device: str) -> list[str]:
    """Return a table of the fastest tiles for each grid and kernel, and the lines of `BLOCKS`.

    Each line has the tiles with the lowest time relative to the fastest tiles (geometric mean over the grids).
    """
    head = "| patches | kernel | fastest | ms | `launch.py` | ms |"
    lines, chosen = [head, "|---" * 6 + "|"], []
    ok = [row for row in rows if row["status"] == "ok"]
    for kernel in KERNELS:
        logs: dict[Blocks, list[float]] = {}
        grids = list(dict.fromkeys(tuple(row["grid"]) for row in ok if row["kernel"] == kernel))
        own = launch.BLOCKS[key_of(kernel, dim, device)]
        for grid in grids:
            times = {
                Blocks(*row["blocks"]): row["ms"] for row in ok if (row["kernel"], tuple(row["grid"])) == (kernel, grid)
            }
            best = min(times, key=times.__getitem__)
            now = f"{times[own]:.3f}" if own in times else "–"
            lines.append(f"| {grid[0]}x{grid[1]} | {kernel} | {best} | {times[best]:.3f} | {own} | {now} |")
            for blocks, took in times.items():
                # On narrow grids, tiles of few rows equal other tiles, and were not timed a second time.
                twin = blocks._replace(by_row=True)
                for each in (blocks, twin) if twin not in times and same_shape(blocks, *grid) else (blocks,):
                    logs.setdefault(each, []).append(math.log(took / times[best]))
        whole = {blocks: sum(each) / len(each) for blocks, each in logs.items() if len(each) == len(grids)}
        if whole:
            best = min(whole, key=whole.__getitem__)
            chosen.append(f"    {key_of(kernel, dim, device)}: Blocks({', '.join(map(str, best))}),")
    return [*lines, "", "BLOCKS = {", *chosen, "}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, check, time, and print.

    Raises:
        ValueError: there is no GPU, and `--toy` was not given.
        RuntimeError: the tiles that the package uses now fail, or their results are wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--dim", type=int, default=64, help="of heads; those wider than 64 have lines of their own")
    parser.add_argument("--output", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--toy", action="store_true", help="a tiny grid in Triton's interpreter, on the CPU")
    given = parser.parse_args(arguments)
    if not given.toy and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU: try the tool on the CPU with --toy")
    begin, device = time.monotonic(), "cpu" if given.toy else "cuda"
    end = begin + 60 * given.minutes
    cases = TOY_CASES if given.toy else [case._replace(dim=given.dim) for case in CASES]
    every = trials(cases, device, given.toy)
    compile_all(every, device, begin + 30 * given.minutes)
    rows: list[dict[str, Any]] = []
    wrong = []
    exact = {case: outcome(case, device, "tiled", torch.float64) for case in cases}
    fused = {case: max(errors(outcome(case, device, "fused", case.dtype), exact[case])) for case in cases}
    for trial in every:
        if time.monotonic() >= end:
            break
        case = trial.case
        row = {"kernel": trial.kernel, "grid": case[:2], "batch": case.batch, "dim": case.dim}
        row |= {"blocks": trial.blocks, **measured(trial, device, exact[case], TIMES_FUSED * fused[case])}
        rows.append(row)
        if given.output:
            with given.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
        own = trial.blocks == launch.BLOCKS[key_of(trial.kernel, case.dim, device)]
        wrong += [f"{trial}: {row['status']}"] if row["status"] == "wrong" or (own and row["ms"] is None) else []
    counts = f"{sum(row['status'] == 'ok' for row in rows)} of {len(every)} trials timed"
    print(
        f"{counts}, {len(rows)} reached, in {time.monotonic() - begin:.0f} s",
        *fastest(rows, cases[0].dim, device),
        sep="\n",
    )
    if wrong:
        raise RuntimeError("\n".join(wrong))


if __name__ == "__main__":
    main()
