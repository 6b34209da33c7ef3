"""Files that are to be written, looked at before hours of work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from relvit.utils.messages import did_you_mean
from relvit.utils.remote import is_address


def check_output(output: str | os.PathLike[str], formats: Sequence[str]) -> str:
    """The ending of a file's name, if a file of this name can be written.

    Raises:
        ValueError: another ending than one of `formats`, or a remote address.
        FileNotFoundError: its folder does not exist.
    """
    if is_address(output):
        raise ValueError(f"output {output} is a remote address: give a file of this machine")
    path = Path(output)
    if path.suffix not in formats:
        hint = did_you_mean(path.suffix, formats)
        raise ValueError(f"output {output} ends in {path.suffix!r}; allowed are {', '.join(formats)}{hint}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"output {output} is in a folder that does not exist; make it first")
    return path.suffix
