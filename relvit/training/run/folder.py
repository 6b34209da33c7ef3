"""One folder per run."""

from __future__ import annotations

import fcntl
import shutil
from datetime import datetime
from pathlib import Path

ARTIFACTS = ("metrics.csv", "predictions.csv", "checkpoints", "summary.json", "unreadable.csv")


def new_run_folder(parent: str | Path, name: str, now: datetime | None = None) -> Path:
    """Make and return `parent/<date>_<time>_<name>`, with a number behind it if that exists: no two runs share one.

    Raises:
        OSError: the folder cannot be made.
    """
    stem = f"{now or datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
    count = 1
    while True:
        folder = Path(parent) / (stem if count == 1 else f"{stem}_{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            count += 1
            continue
        return folder


class RunLock:
    """Keeps a run's folder for this process, until it ends, however it ends.

    Args:
        folder: the folder.

    Raises:
        BlockingIOError: another process has it.
    """

    NAME = ".lock"

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / self.NAME, "w")  # noqa: SIM115 (open as long as the lock is held)
        try:
            # Of the process alone: workers that outlive it for a moment do not inherit it, as they would with flock.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise BlockingIOError(error.errno, f"{folder} is being trained in by another process") from None

    def release(self) -> None:
        """Let others have the folder."""
        self._file.close()


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of an empty run: one that failed before it wrote any artifact of a training."""
    if not any((folder / name).exists() for name in ARTIFACTS):
        shutil.rmtree(folder)
