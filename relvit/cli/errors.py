"""Short messages for the user's mistakes."""

from __future__ import annotations

import re

from relvit.utils.files import DISK_ERRORS
from relvit.utils.messages import MissingPackageError
from relvit.utils.remote import DownloadError

# Lines of the parser's nested reports that only say which types it has tried.
NOISE = (
    r"Parser key |Does not validate|Subtypes:|Errors:|Given value|Expected a path but |Expected a <class 'NoneType'>"
)


class UsageError(ValueError):
    """A flag or configuration that the command does not understand."""


def is_users_mistake(error: Exception) -> bool:
    """Whether the message alone says enough: bad values and missing files, in contrast to faults of the program."""
    mistakes = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, MissingPackageError)
    return isinstance(error, mistakes)


def says_enough(error: Exception) -> bool:
    """Whether a message needs no hint at the program's insides: the user's mistakes, the disk and the network."""
    full = isinstance(error, OSError) and error.errno in DISK_ERRORS
    return full or isinstance(error, DownloadError) or is_users_mistake(error)


def describe(error: Exception) -> str:
    """What went wrong in few words: without the traceback that a data loader's worker puts into its message."""
    # Not above: it loads torch and Lightning, which `relvit --help` can do without.
    from relvit.data.images.decode import UnreadableImageError

    text = str(error)
    if "Original Traceback" in text:
        # The worker's own message follows the last line that names the exception's type.
        text = re.split(rf"^(?:[\w.]+\.)?{re.escape(type(error).__name__)}: ", text, flags=re.MULTILINE)[-1]
    if isinstance(error, UnreadableImageError):
        text = f"{text.strip()} (relvit check-data finds all such files, --data.on_error skip goes on without them)"
    # As Lightning says it of its loggers.
    if absent := re.search(r"class_path '(?:\w+\.)*(\w+)'.*?Requirement '([\w-]+)", text, re.DOTALL):
        return str(MissingPackageError(absent[1], absent[2]))
    if text.startswith("Does not validate"):
        # A constructor's own error, wrapped by the parser that tried every type which the option may have.
        lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
        text = "\n".join(line for line in lines if line and not re.match(NOISE, line))
    text = text.strip() or "no further message"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return text if says_enough(error) else f"{type(error).__name__}: {text}"
