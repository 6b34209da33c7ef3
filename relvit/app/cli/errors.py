"""Errors of the command line: which are the user's mistakes, and how each is described in one sentence."""

from __future__ import annotations

import errno
import re
from traceback import walk_tb
from types import FrameType

from relvit.app.utils.exceptions import LostProcessError, MissingPackageError
from relvit.app.utils.files import DISK_ERRORS
from relvit.app.utils.remote import DownloadError

# If a worker process of a data loader has ended, PyTorch raises an error with these words in its message.
LOST_WORKER = re.compile(r"DataLoader worker \(pid.*\) (is killed|exited)", re.DOTALL)
# If the shared memory is full, a worker raises an error with the first words, or the operating system kills the worker
# by a bus error.
FULL_SHARED_MEMORY = re.compile(r"</torch_\w+>: No space left on device|DataLoader worker .* by signal: Bus error")


class UsageError(ValueError):
    """An option, argument or configuration that the command does not understand."""


def is_users_mistake(error: Exception) -> bool:
    """Return whether the message alone is enough: bad values and missing files, unlike faults of the program."""
    files = (FileNotFoundError, NotADirectoryError, PermissionError, BlockingIOError)
    mistakes = (ValueError, MissingPackageError, *files)
    of_path = isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EROFS)
    # Lightning's `MisconfigurationException` is compared by name, since importing Lightning takes seconds.
    return of_path or isinstance(error, mistakes) or type(error).__name__ == "MisconfigurationException"


def is_self_explanatory(error: Exception) -> bool:
    """Return whether a message needs no hint at `--debug`: the user's mistakes, the disk and the network."""
    full = isinstance(error, OSError) and error.errno in DISK_ERRORS
    if isinstance(error, RuntimeError) and any(text.search(str(error)) for text in (LOST_WORKER, FULL_SHARED_MEMORY)):
        return True
    return full or isinstance(error, DownloadError | LostProcessError) or is_users_mistake(error)


# These commands can continue without images that cannot be read (`--data.on_error skip`).
SKIPPING = ("fit", "validate", "test", "predict")


def describe(error: Exception, command: str = "fit") -> str:
    """Describe what went wrong, without what jsonargparse and the workers of data loaders put around a message."""
    # Import this class only here: the import takes seconds, and every command imports the present file.
    from relvit.app.data.images.decode import UnreadableImageError

    cause = _cause(error)
    # Notes say which image of a user's dataset raised the error.
    text = "\n".join([str(cause), *getattr(cause, "__notes__", ())])
    if "Original Traceback" in text:
        # PyTorch puts a worker's traceback into the message: the worker's own message follows the last line that begins
        # with the exception's type.
        text = re.split(rf"^(?:[\w.]+\.)?{re.escape(type(error).__name__)}: ", text, flags=re.MULTILINE)[-1]
    if isinstance(error, UnreadableImageError):
        skip = ", --data.on_error skip goes on without them" if command in SKIPPING else ""
        text = f"{text.strip()} (relvit check-data finds all such files{skip})"
    # The constructors of Lightning's loggers raise this error if their package is missing, so say how to install the
    # package.
    if isinstance(cause, ModuleNotFoundError) and (package := re.match(r"Requirement '([\w-]+)", text)):
        return str(MissingPackageError(type(_frame(cause).f_locals.get("self")).__name__, package[1]))
    workers = f"--{'data.' if command == 'fit' else ''}num_workers"
    if FULL_SHARED_MEMORY.search(text):
        return (
            "the shared memory /dev/shm, in which processes that load images pass batches on, is full: enlarge it "
            f"(docker run --shm-size=8g), give smaller batches or images, or load in the main process ({workers}=0)"
        )
    if LOST_WORKER.search(text):
        return (
            "a process that loads images has ended, perhaps because memory ran out: give fewer processes "
            f"({workers}), or smaller batches or images"
        )
    text = text.strip() or "no further message"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None:
            cure = f": {DISK_ERRORS[error.errno]}" if error.errno in DISK_ERRORS else ""
            text = f"{text}: {error.filename}{cure}"
    return text if is_self_explanatory(error) else f"{type(error).__name__}: {text}"


def without_parser(error: Exception) -> Exception:
    """Return the exception that a constructor raised instead of the one that jsonargparse made of it.

    A TypeError stays as it is, because constructors of relvit raise it for wrong arguments; so does an ImportError,
    which Lightning's loggers raise if their package is missing. Both are a user's mistake.
    """
    cause = _cause(error)
    return cause if isinstance(cause, Exception) and not isinstance(cause, TypeError | ImportError) else error


def _cause(error: BaseException) -> BaseException:
    """Follow `__cause__` to the exception of a constructor.

    jsonargparse raises an error of its own around it, which lists all types that jsonargparse has tried.
    """
    while error.__cause__ is not None and _raised_in_jsonargparse(error):
        error = error.__cause__
    return error


def _raised_in_jsonargparse(error: BaseException) -> bool:
    frame = _frame(error)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("jsonargparse.")


def _frame(error: BaseException) -> FrameType | None:
    """Return the frame that raised an error."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1] if frames else None
