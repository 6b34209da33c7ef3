"""Write files and folders atomically, complete or not at all; check output paths before long work begins."""

from __future__ import annotations

import csv
import ctypes
import errno
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from relvit.app.utils.shown_text import without_secrets
from relvit.utils.messages import did_you_mean

# The names of the files that `relvit export` writes end in one of these suffixes.
EXPORTED = (".onnx", ".pt2")
# These errors mean that the disk or the user's quota is full, that the file system is read-only, or that it does not
# take a file of this size. `DISK_ERRORS` maps each error to what a user can do about it.
DISK_ERRORS = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "make the disk writable",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f, or the file system's)",
}


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name has one of the endings of the files that `relvit export` writes."""
    return os.fspath(path).endswith(EXPORTED)


def not_for_exported(path: str | os.PathLike[str]) -> str:
    """Return the error about an exported file that is given instead of a checkpoint."""
    only = "which only predict, test and validate take"
    return f"{os.fspath(path)} is an exported file, {only}: give the checkpoint that was exported"


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file's name, and rename the temporary file to `path` at the end.

    Even if the writing is interrupted, `path` holds either the old content or all of the new content.

    Args:
        path: the file, which is replaced if it exists. Its folder is made if it does not exist. If it is a symbolic
            link, the link stays, and its target is written.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file is in the same folder, because renaming is a single step only within one file system.
    part = _part_of(target)
    try:
        with disk_errors_name(path, part):
            yield part
            move_complete(part, target)
    finally:
        # The part is still there after an error, and where it is a link to the same file as `target`: the system then
        # renames nothing.
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder, whose files at the end become the files of the folder `path`, all in one step.

    Even if the writing is interrupted, `path` holds either all of the old files or all of the new files, never a
    mixture. Files and folders with other names in `path` stay there. Where the system cannot exchange two folders in
    one step (systems other than Linux, some network file systems), there is no folder at `path` for a moment.

    Args:
        path: the folder; neither the folder nor its parents need exist.

    Raises:
        ValueError: the folder is the current folder or a mount point, and so cannot be exchanged.
        OSError: the parent folder cannot be written to, or the disk is full.
    """
    # Resolve symbolic links, so that a link at `path` stays a link, and only its target is exchanged.
    folder = Path(path).resolve()
    if folder.is_dir() and (folder == Path.cwd() or os.path.ismount(folder)):
        raise ValueError(f"{path} is the current folder or a mount point: give a folder in it")
    part = _part_of(folder)
    with disk_errors_name(path, part):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        try:
            yield part
            for written in (*part.rglob("*"), part):
                _sync(written)
            if folder.is_dir():
                for kept in folder.iterdir():
                    if not os.path.lexists(part / kept.name):
                        _link_all(kept, part / kept.name)
                shutil.copymode(folder, part)
                _exchange(part, folder)
            else:
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _link_all(path: Path, other: Path) -> None:
    """Give a file, or each file in a folder, a second name by a hard link, or a copy where there are no links."""

    def link(one: str, two: str) -> None:
        try:
            os.link(one, two, follow_symlinks=False)
        except OSError:
            shutil.copy2(one, two, follow_symlinks=False)

    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, other, symlinks=True, copy_function=link)
    else:
        link(str(path), str(other))


def move_complete(part: Path, path: Path) -> None:
    """Rename a temporary file to `path`, when all of its content is on the disk."""
    _sync(part)
    os.replace(part, path)


def _part_of(path: Path) -> Path:
    """Return a new name each time: in containers, and on machines that share a disk, processes have equal numbers.

    The name ends in the process's number, by which `remove_parts` finds out whether the process still runs.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{os.getpid()}.part")


def _sync(path: Path) -> None:
    """Wait until a file is on the disk; otherwise its new name may be there before the content is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders, in one step where the system can."""
    here, exchange = -100, 2  # In Linux these numbers are called AT_FDCWD and RENAME_EXCHANGE.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return
    aside = one.with_name(f"{one.name}.old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


@contextmanager
def disk_errors_name(path: str | os.PathLike[str], part: Path) -> Iterator[None]:
    """Turn any library's error of a full or failing disk into an OSError that names the user's path.

    Raises:
        OSError: the disk is full or cannot be written to.
    """
    try:
        yield
    except Exception as error:
        found = _disk_error(error)
        # An error that names another file is not about this file, so raise it unchanged.
        if found is None or (found.filename is not None and not str(found.filename).startswith(str(part))):
            raise
        raise OSError(found.errno, os.strerror(found.errno), str(path)) from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of the disk behind an exception, which PyTorch and libraries in Rust (safetensors) wrap."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return error
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is not None and int(found[1]) in DISK_ERRORS:
            return OSError(int(found[1]), os.strerror(int(found[1])))
        error = error.__cause__ or error.__context__
    return None


def link_or_copy(path: Path, other: Path) -> None:
    """Make `other` a hard link to the present content of `path`, or a copy if the file system has no hard links.

    `atomic_write` replaces `path` instead of changing the file, so the link keeps this content.
    """
    with atomic_write(other) as part:
        try:
            # `os.link` would give a second name to a symbolic link itself, whose target later gets other content.
            os.link(os.path.realpath(path), part)
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
    """Remove what `atomic_write` and `atomic_folder` have left in a folder where their process was killed.

    Call this function only before this process writes to the folder: a file with the number of this process is then
    from an earlier container, in which a process had the same number.
    """
    for part in folder.glob(".*.part"):
        process = part.name.split(".")[-2]
        if process.isdigit() and (int(process) == os.getpid() or not _is_alive(int(process))):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # PermissionError: the process exists but belongs to another user.
    except PermissionError:
        return True
    return True


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as a CSV file with a header, see `atomic_write`."""
    with atomic_write(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        # Write each row before the next one is made, because the texts of all rows may take many times the memory of
        # their numbers.
        csv.writer(file).writerows(map(without_secrets, map(list, chain([header], rows))))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file, see `atomic_write`. NaN and infinity become null, because JSON has no such numbers."""
    text = json.dumps(_with_nulls(without_secrets(value)), indent=2, allow_nan=False)
    with atomic_write(path) as part:
        part.write_text(text + "\n", encoding="utf-8")


def _with_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_nulls(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text from an untrusted source.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply for Python's parser.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def from_here(path: str) -> str:
    """Return a file's path as tables name it: relative if the file is below the current folder, otherwise absolute."""
    return absolute(path).removeprefix(os.path.join(os.getcwd(), ""))


def absolute(path: str) -> str:
    """Return the absolute path of the same file.

    The file system resolves the part of a path up to the last `..`. The text alone is not enough to resolve the path:
    after a link to a folder, `..` is the parent of the folder that the link leads to. If there is no such folder, `..`
    stays, and opening the path fails.
    """
    # Return addresses unchanged: `abspath` would make `//` a single slash, and the code that hides passwords in
    # addresses would no longer recognise the address.
    if is_address(path):
        return path
    # If a path has no `..`, `abspath` only puts the current folder before a relative path, and removes `.` and surplus
    # slashes, so the path still names the same file.
    if os.pardir not in path.split(os.sep):
        return os.path.abspath(path)
    whole = Path(path).absolute()
    last = len(whole.parts) - whole.parts[::-1].index(os.pardir)
    start = Path(*whole.parts[:last])
    if not start.is_dir():
        return str(whole)
    return str(start.resolve().joinpath(*whole.parts[last:]))


def kept_path(path: str) -> str:
    """Return the absolute path, with which a checkpoint can be used from other folders; `~` is the home folder."""
    return absolute(os.path.expanduser(path))


def canonical_paths(paths: Iterable[str]) -> Iterator[str]:
    """Yield each path with its folder resolved (`..`, links), so that all spellings of a file's name become one.

    A file that is itself a link is not replaced by the link's target.
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


def check_output(output: str | os.PathLike[str], formats: Sequence[str], replaces: bool = True) -> str:
    """Return the suffix of an output file, checked together with the file's folder, which need not exist.

    Args:
        output: the file.
        formats: the suffixes that the file may have.
        replaces: whether the file may exist.

    Raises:
        ValueError: `output` is a folder or a remote address, or has a suffix that is not in `formats`; or it exists,
            and `replaces` is False.
        NotADirectoryError: a part of the path is a file.
        PermissionError: the folder cannot be written to.
    """
    if is_address(output):
        raise ValueError(f"output {output} is a remote address: give a file of this machine")
    path = Path(output)
    if path.is_dir() or not path.suffix:
        found = "is a folder" if path.is_dir() else "is a name without an ending"
        raise ValueError(f"output {output} {found}: give a file whose name ends in {' or '.join(formats)}")
    if path.suffix not in formats:
        hint = did_you_mean(path.suffix, formats)
        raise ValueError(f"output {output} ends in {path.suffix!r}; allowed are {', '.join(formats)}{hint}")
    check_writable(Path(os.path.realpath(path)).parent)
    if not replaces and path.exists():
        raise ValueError(f"output {output} exists: give another one (--output), or move it away first")
    return path.suffix


def check_writable(folder: Path, cure: str = "give another one (--output)") -> None:
    """Refuse a folder in which this process cannot make files, before long work begins; the folder need not exist.

    Args:
        folder: the folder.
        cure: what the user can do, for the message.

    Raises:
        NotADirectoryError: a part of the path is a file.
        PermissionError: the folder, or the folder in which it would be made, cannot be written to.
    """
    folder = folder.absolute()
    present = next(each for each in (folder, *folder.parents) if each.exists())
    if not present.is_dir():
        raise NotADirectoryError(f"cannot write into {present}, which is not a folder: {cure}")
    if not os.access(present, os.W_OK):
        raise PermissionError(f"the folder {present} cannot be written to: {cure}")
