"""Atomic writes of any file, complete or not at all, and checks before long work that an output can be written."""

from __future__ import annotations

import csv
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relvit.utils.messages import did_you_mean

# The disk or the user's quota is full, the file system is read-only, or takes no file of this size.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file's name, and rename the temporary file to `path` at the end.

    Whatever interrupts the writing, `path` holds the old content or the new content, never a part.

    Args:
        path: the file, in a folder that exists. A file that is there already is replaced.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    # The file is in the same folder, since renaming is a single step only within one file system.
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


def link_or_copy(path: Path, other: Path) -> None:
    """Let `other` be the content that `path` has now, by a hard link; by a copy where the file system has no links.

    The link keeps this content when `path` is replaced, as `atomic_write` does.
    """
    with atomic_write(other) as part:
        try:
            os.link(path, part)
        except OSError:
            shutil.copyfile(path, part)


def has_links(folder: Path) -> bool:
    """Return whether files in a folder can have a second name by a hard link."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".links-") as tried:
            (Path(tried) / "file").touch()
            os.link(Path(tried) / "file", Path(tried) / "link")
    except OSError:
        return False
    return True


def remove_parts(folder: Path) -> None:
    """Remove the temporary files that `atomic_write` has left in a folder where its process was killed."""
    for part in folder.glob(".*.part"):
        process = part.name.split(".")[-2]
        if process.isdigit() and int(process) != os.getpid() and not _is_alive(int(process)):
            part.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A process of somebody else may not be asked, but there is one.
    except PermissionError:
        return True
    return True


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as a CSV file with a header."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def from_here(path: str) -> str:
    """Return a file's path as tables name it: relative to the current folder where it is below that, else absolute."""
    return absolute(path).removeprefix(os.path.join(os.getcwd(), ""))


def absolute(path: str) -> str:
    """Return the absolute path of the same file.

    The file system resolves what comes before `..`, as no text operation can: behind a link to a folder, `..` is the
    parent of the folder that the link leads to. Where there is no such folder `..` stays: opening the path then fails.
    """
    # Without `..`, abspath changes nothing but `.` and doubled slashes.
    if os.pardir not in path.split(os.sep):
        return os.path.abspath(path)
    whole = Path(path).absolute()
    last = len(whole.parts) - whole.parts[::-1].index(os.pardir)
    start = Path(*whole.parts[:last])
    if not start.is_dir():
        return str(whole)
    return str(start.resolve().joinpath(*whole.parts[last:]))


def kept_path(path: str) -> str:
    """Return the absolute path, as a checkpoint keeps it to be used from other folders; `~` is the home folder."""
    return absolute(os.path.expanduser(path))


def canonical_paths(paths: Iterable[str]) -> Iterator[str]:
    """Yield each path with its folder resolved (`..`, links), so that all spellings of a file's name become one.

    A file that is itself a link stays apart from what the link leads to.
    """
    folders: dict[str, str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        yield os.path.join(folders[folder], name)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a remote address such as https://..., not the path of a local file."""
    return "://" in os.fspath(path)


def check_output(
    output: str | os.PathLike[str], formats: Sequence[str], makes_folder: bool = False, replaces: bool = True
) -> str:
    """Return the suffix of an output file, checked together with the file's folder.

    Args:
        output: the file.
        formats: the suffixes that it may have.
        makes_folder: the folder need not exist yet, as it will be made where it can be.
        replaces: whether the file may exist.

    Raises:
        ValueError: another suffix than one of `formats`, a remote address, or without `replaces` an existing file.
        FileNotFoundError: the folder does not exist.
        NotADirectoryError: with `makes_folder`, a part of the path is a file.
    """
    if is_address(output):
        raise ValueError(f"output {output} is a remote address: give a file of this machine")
    path = Path(output)
    if path.suffix not in formats:
        hint = did_you_mean(path.suffix, formats)
        raise ValueError(f"output {output} ends in {path.suffix!r}; allowed are {', '.join(formats)}{hint}")
    if makes_folder:
        present = next(parent for parent in path.absolute().parents if parent.exists())
        if not present.is_dir():
            raise NotADirectoryError(f"output {output} cannot be in {present}, which is no folder")
    elif not path.parent.is_dir():
        raise FileNotFoundError(f"output {output} is in a folder that does not exist; make it first")
    if not replaces and path.exists():
        raise ValueError(f"output {output} exists: give another one (--output), or remove it first")
    return path.suffix
