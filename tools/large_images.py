"""Measure time and memory of one large image, with attention in windows and to all tokens: a table in Markdown.

    python tools/large_images.py                                   # relvit_tiny up to 4,096 x 4,096 pixels
    python tools/large_images.py --model relvit_small --sizes 2048

Each cell runs in a process of its own: the quickest of three forward passes, or of fewer where time is up. Memory is
what they add at their peak to that process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import timm
import torch

import relvit  # noqa: F401  registers the models
from relvit.models import set_reach


def measure(model: str, size: int, reach: str, cap: float, results: Connection) -> None:
    """Send seconds and bytes of the forward pass of one image."""
    net = set_reach(timm.create_model(model, num_classes=10).eval(), reach)
    image = torch.randn(1, 3, size, size)
    with torch.inference_mode():
        net(torch.randn(1, 3, 224, 224))
        before, seconds = _peak(), []
        while len(seconds) < 3 and sum(seconds) + min(seconds, default=0) < cap:
            begin = time.perf_counter()
            net(image)
            seconds.append(time.perf_counter() - begin)
        results.send((min(seconds), _peak() - before))


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_process(function: Callable[..., None], arguments: tuple[Any, ...], cap: float, show: Callable[..., str]) -> str:
    """Run a function in a process of its own and show the results that it sends; name what takes over `cap` seconds.

    Args:
        function: called with `arguments` and the connection to which it sends its results.
        arguments: values that can be pickled.
        cap: seconds.
        show: makes the text of the results.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*arguments, send))
    process.start()
    send.close()
    try:
        return show(*receive.recv()) if receive.poll(cap) else f"over {cap:.0f} s"
    except EOFError:
        return "out of memory"
    finally:
        process.kill()
        process.join()


def cell(model: str, size: int, reach: str, cap: float) -> str:
    """Measure one cell of the table."""
    text = "{:.2f} s, {:.2f} GiB".format
    return in_process(
        measure, (model, size, reach, cap / 2), cap, lambda seconds, memory: text(seconds, memory / 2**30)
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="relvit_tiny")
    add("--sizes", type=int, nargs="+", default=[224, 512, 1024, 2048, 4096])
    add("--cap", type=float, default=300.0, help="seconds that a cell may take")
    given = parser.parse_args()
    print(f"{given.model}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| pixels | patches | in windows | to all tokens |\n|---|---|---|---|")
    for size in given.sizes:
        cells = [cell(given.model, size, reach, given.cap) for reach in ("windows", "trained")]
        print(f"| {size} x {size} | {(size // 16) ** 2:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
