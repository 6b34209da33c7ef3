"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The disk is full, or what one may use of it; or nothing may be written there at all.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` at the end.

    Whatever interrupts that, what is at `path` is the old file or the new one.

    Args:
        path: the file, in a folder that exists. One that is there already is replaced.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    # In the same folder, since only within one file system is renaming a single step.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with open(part, "rb") as file:
            # Otherwise the new name may reach the disk before the content does.
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
