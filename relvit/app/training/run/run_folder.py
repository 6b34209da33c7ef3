"""Name a run folder by date and model, and lock it against other processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from relvit.app.data.images.folders import ARTIFACTS

# These errors mean that a file system has no locks, as Lustre without the mount option `flock`.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def new_run_folder(parent: str | Path, name: str, now: datetime | None = None) -> Path:
    """Make and return the folder `parent/<date>_<time>_<name>`, with a number appended if it exists already.

    Raises:
        OSError: The folder cannot be made.
    """
    stem = f"{now or datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
    count = 1
    while True:
        folder = Path(parent) / (stem if count == 1 else f"{stem}_{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            count += 1
        else:
            return folder


class RunLock:
    """Lock a run's folder for this process, until `release` or the end of the process.

    If the file system has no locks, a warning says so.

    Raises:
        BlockingIOError: Another process has the lock.
    """

    NAME = ".lock"

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / self.NAME, "w")  # noqa: SIM115 (open as long as the lock is held)
        try:
            # Use `lockf`, since workers of a dataloader do not inherit its lock. Workers may outlive this process for a
            # moment, and with a lock of `flock`, which they would inherit, the folder would stay locked.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise BlockingIOError(
                error.errno, f"{folder} is in use by another training: wait for its end, or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                self._file.close()
                raise
            message = f"the file system of {folder} has no locks ({error.strerror}): start no second training in it"
            warnings.warn(message, stacklevel=2)

    def release(self) -> None:
        """Unlock the folder."""
        self._file.close()


def missing_folders(folder: Path) -> list[Path]:
    """Return a folder and its parents, the innermost first, as far as they do not exist."""
    return [part for part in (folder, *folder.parents) if not part.exists()]


def remove_if_empty(folder: Path, made: Sequence[Path] = ()) -> None:
    """Remove the folder of a run without artifacts, and the empty folders among those `made` for this run."""
    if any((folder / name).exists() for name in ARTIFACTS):
        return
    # The lock's file may still be open. NFS keeps an open file under another name, so its folder cannot be removed.
    # Ignore this error, because it must not replace the error that has ended the run.
    shutil.rmtree(folder, ignore_errors=True)
    for parent in made:
        # If another run has started in this folder meanwhile, `rmdir` fails, because the folder is not empty: it stays.
        with contextlib.suppress(OSError):
            parent.rmdir()
