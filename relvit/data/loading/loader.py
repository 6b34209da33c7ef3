"""Processes that load images, in a run that is told to stop."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader

# How long workers have to end by themselves when Python ends, in seconds.
PATIENCE = 1.0

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_registered_in: int | None = None


class SteadyLoader(DataLoader):
    """A `DataLoader` whose workers outlive what stops the run from their first moment on, and end with Python.

    Its `worker_init_fn` is to be :func:`heed_no_stop_signal`.
    """

    def __iter__(self) -> Iterator[Any]:
        end_workers_at_exit()
        if self.num_workers and (self.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
            # The server lives on and has other children: it must not be born like the workers.
            forkserver.ensure_running()
        # Workers are born with these signals blocked, and ignore them before they let them through. What the run itself
        # is sent meanwhile, it gets afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_no_stop_signal(worker: int) -> None:
    """Let a loader's worker go on when the run is told to stop, as the run goes on until it has saved.

    Batch systems, and `kill` on a process group, send SIGTERM or SIGUSR1 to workers as well; without them the run ends
    in an error. Workers end when their loader or their run does, see :func:`end_workers_at_exit`.

    Args:
        worker: Its number, as a `DataLoader` gives it to its `worker_init_fn`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def end_workers_at_exit() -> None:
    """See to it that workers that are left when Python ends do end.

    Python itself would send them SIGTERM, which they ignore, and wait for ever.
    """
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        Finalize(None, _end_workers, exitpriority=100)


def _end_workers() -> None:
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left and threading.current_thread() is threading.main_thread():
        # PyTorch's handler takes the death of a worker for an error.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in left:
        child.terminate()
    for child in left:
        child.join(PATIENCE)
        if child.is_alive():
            child.kill()
