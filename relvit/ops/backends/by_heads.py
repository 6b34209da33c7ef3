"""Python threads that compute the tiles of whole heads, for the backend `tiled` on large grids of the CPU.

OpenMP's threads share each operation of a tile, and wait for each other after every operation. Here the same number of
Python threads compute, each with one OpenMP thread, and wait for each other only once, at the end. The threads run at
the same time, because PyTorch's operations release the GIL. A single thread adds up all sums of a head, tile after
tile, so results depend neither on the number of threads nor on which thread computes a head.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Barrier, Thread

import torch
from torch import Tensor

from relvit.ops.backends.tile import Tile
from relvit.ops.tracing import is_watched

# Each thread computes whole heads if the number of queries times the number of keys is at least `LEAST_LOGITS`, as in
# an image of 64 x 32 patches. For smaller images, waiting for the GIL costs more time than the threads save.
LEAST_LOGITS = 1 << 22


def threads_by_heads(query: Tensor, key: Tensor) -> int:
    """Return how many threads share the heads equally, 1 where that is not faster."""
    (_, heads, queries, _), threads = query.shape, torch.get_num_threads()
    large = query.device.type == "cpu" and queries * key.shape[2] >= LEAST_LOGITS
    return threads if large and heads % threads == 0 else 1


def run(compute: Callable[[Iterable[Tile]], None], tiles: Iterable[Tile], threads: int) -> None:
    """Call `compute` once with all tiles or, without gradients, in several threads, each with the tiles of some heads.

    When `run` returns, or raises an error of a thread, no thread computes any longer.
    """
    # A profiler or dispatch mode sees only the operations of the calling thread, so compute all tiles in that thread.
    if threads == 1 or is_watched():
        compute(tiles)
        return
    by_head: dict[int, list[Tile]] = {}
    for tile in tiles:
        by_head.setdefault(tile.heads.start, []).append(tile)
    left, inference = deque(by_head.values()), torch.is_inference_mode_enabled()

    def take_heads() -> Iterator[Tile]:
        # When all heads are taken, `popleft` raises IndexError, which ends the loop.
        with suppress(IndexError):
            while True:
                yield from left.popleft()

    def work(future: Future) -> None:
        try:
            # PyTorch has inference and gradient modes per thread: set them as in the calling thread. Autocast is off in
            # new threads, as it must be for tiles.
            with torch.inference_mode(inference), torch.no_grad():
                future.set_result(compute(take_heads()))
        except BaseException as error:
            left.clear()
            future.set_exception(error)

    # A forked process has no threads of its parent. The process id of the forked process is a new key for the cached
    # function, which then starts new threads.
    jobs, futures = _served_queue(threads, os.getpid()), [Future() for _ in range(threads)]
    for future in futures:
        jobs.put(partial(work, future))
    try:
        wait(futures)
    finally:
        # Clear the queue, so that no thread takes a further head if Ctrl+C ends `wait`.
        left.clear()
    for future in futures:
        future.result()


@functools.cache
def _served_queue(threads: int, process: int) -> SimpleQueue[Callable[[], None]]:
    """Start threads of one OpenMP thread each, which call the functions in the queue until the process ends."""
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
    started = Barrier(threads + 1)

    def serve() -> None:
        # In each new thread the first call of `get_num_threads` restores the process's number of threads and so would
        # undo `set_num_threads(1)`: make that call first.
        torch.get_num_threads()
        torch.set_num_threads(1)
        started.wait()
        while True:
            jobs.get()()

    # Python does not wait for daemon threads when the process ends, so these threads, which wait for jobs for ever, do
    # not keep the process alive.
    for number in range(threads):
        Thread(target=serve, name=f"relvit-heads-{number}", daemon=True).start()
    started.wait()
    # Calling `set_num_threads(1)` in these threads also changed the number for later threads of the process: set it
    # back.
    torch.set_num_threads(threads)
    return jobs
