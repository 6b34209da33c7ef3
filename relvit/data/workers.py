"""Processes that load images."""

import signal
from types import FrameType


def work_until_told_twice(worker: int) -> None:
    """Let a loader's worker go on when the run is told to stop, as the run goes on until it has saved.

    Batch systems, and `kill` on a process group, send SIGTERM or SIGUSR1 to workers as well; without them the run ends
    in an error. The loader itself ends its workers by other means, and by SIGTERM only those that do not listen: the
    first one is ignored, the second one obeyed.

    Args:
        worker: Its number, as a `DataLoader` gives it to its `worker_init_fn`.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _wait_for_another)


def _wait_for_another(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
