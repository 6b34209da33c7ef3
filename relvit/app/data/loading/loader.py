"""Signal-safe DataLoader: its workers ignore SIGTERM and SIGUSR1, which stop a run after it has saved."""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader

# When Python ends, relvit waits this number of seconds for each worker to end by itself, and then kills it.
PATIENCE = 1.0

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_registered_in: int | None = None


class SignalSafeDataLoader(DataLoader[Any]):
    """DataLoader whose workers ignore stop signals from their start on, and end when Python ends.

    Args:
        arguments, options: The arguments of `DataLoader` except `worker_init_fn`, which is `_begin_worker`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, worker_init_fn=_begin_worker, **options)

    def __iter__(self) -> Iterator[Any]:
        end_workers_at_exit()
        if self.num_workers and (self.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
            # Start the fork server first: it outlives the loader and has other children, so it must not inherit blocked
            # signals.
            forkserver.ensure_running()
        # A stop signal must not end a worker before the worker has begun to ignore such signals. So block these signals
        # until all workers have started. Workers inherit the block, and end it only when they ignore the signals. This
        # process receives the signals when its own block ends.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        # A forked worker must not free garbage that it inherits from this process: freeing an onnxruntime session would
        # wait for threads that exist only in this process. So workers start without garbage collection, and
        # `_begin_worker` freezes the garbage that they inherit. Freezing here would freeze this process's garbage, too.
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().__iter__()
        finally:
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(worker: int) -> None:
    gc.freeze()
    gc.enable()
    ignore_stop_signals(worker)


def ignore_stop_signals(worker: int) -> None:
    """Let a DataLoader worker ignore stop signals, since the run itself continues until it has saved a checkpoint.

    Batch systems, and `kill` on a process group, send SIGTERM or SIGUSR1 to workers as well. If the workers ended at
    the signal, the run would fail with an error before it could save a checkpoint. Workers end when their loader or
    their run ends, see :func:`end_workers_at_exit`.

    Args:
        worker: The number of the worker, as a `DataLoader` gives it to its `worker_init_fn`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def end_workers_at_exit() -> None:
    """Register a function that ends all remaining workers when Python ends.

    Without this function, Python would send SIGTERM, which workers ignore, and wait for the workers for ever.
    """
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        Finalize(None, _end_workers, exitpriority=100)


def identity_collate(batch: Any) -> Any:
    """Return a batch unchanged: the collate function of datasets that make batches at once."""
    return batch


def _end_workers() -> None:
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left and threading.current_thread() is threading.main_thread():
        # PyTorch's SIGCHLD handler would report the end of a worker as an error, so switch it off.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in left:
        child.terminate()
    for child in left:
        child.join(PATIENCE)
        if child.is_alive():
            child.kill()
