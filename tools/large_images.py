"""Measure time and memory of one large image by `--reach` (all tokens, windows, bands): a table in Markdown.

    python tools/large_images.py                                   # relvit_tiny up to 4,096 x 4,096 pixels
    python tools/large_images.py --reach bands trained --sizes 4096x512 16384x512

Each cell is measured in a new process: the time is that of the fastest of three forward passes, or of fewer when the
time is up; the memory is by how much the passes raise the peak of the process. In the column 'bands' a generator yields
one band after the other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import timm
import torch
from torch import Tensor

import relvit  # noqa: F401  registers the models
from relvit.families.transformer_xl import classify_bands
from relvit.models import set_reach

# A band has the same number of rows of patches as images in training.
ROWS, PATCH = 14, 16


def read_bands(height: int, width: int) -> Iterator[Tensor]:
    """Yield bands as they may come from a file: bytes that are converted one band after the other."""
    for top in range(0, height, ROWS * PATCH):
        rows = min(ROWS * PATCH, height - top)
        yield torch.randint(0, 256, (1, 3, rows, width), dtype=torch.uint8).float().div_(127.5).sub_(1)


def measure(model: str, reach: str, height: int, width: int, cap: float, results: Connection) -> None:
    """Time forward passes, and send the seconds and the additional bytes of memory through `results`."""
    net = timm.create_model(model, num_classes=10).eval()
    if reach == "bands":

        def classify() -> None:
            classify_bands(net, read_bands(height, width), ROWS)
    else:
        set_reach(net, reach)
        image = torch.randn(1, 3, height, width)

        def classify() -> None:
            net(image)

    with torch.inference_mode():
        net(torch.randn(1, 3, 224, 224))
        before, seconds = peak(), []
        while len(seconds) < 3 and sum(seconds) + min(seconds, default=0) < cap:
            begin = time.perf_counter()
            classify()
            seconds.append(time.perf_counter() - begin)
        results.send((min(seconds), peak() - before))


def peak() -> int:
    """Return the highest memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cell(model: str, reach: str, height: int, width: int, cap: float) -> str:
    """Measure in a new process, which ends after `cap` seconds."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(model, reach, height, width, cap / 2, send))
    process.start()
    send.close()
    try:
        if not receive.poll(cap):
            return f"over {cap:.0f} s"
        seconds, memory = receive.recv()
        return f"{seconds:.2f} s, {memory / 2**30:.2f} GiB"
    except EOFError:
        return "out of memory"
    finally:
        process.kill()
        process.join()


def size_of(text: str) -> tuple[int, int]:
    """Read a size: '224' is a square, '4096x512' is height and width."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="relvit_tiny")
    add("--reach", nargs="+", choices=("windows", "bands", "trained"), default=["windows", "trained"])
    add("--sizes", type=size_of, nargs="+", default=[(side, side) for side in (224, 512, 1024, 2048, 4096)])
    add("--cap", type=float, default=300.0, help="seconds that a cell may take")
    given = parser.parse_args()
    print(f"{given.model}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(f"| pixels | patches | {' | '.join(given.reach)} |\n|---|---|{'---|' * len(given.reach)}")
    for height, width in given.sizes:
        cells = [cell(given.model, reach, height, width, given.cap) for reach in given.reach]
        patches = (height // PATCH) * (width // PATCH)
        print(f"| {height} x {width} | {patches:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
