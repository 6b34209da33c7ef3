"""Names in error messages."""

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.4) -> str | None:
    """The allowed name nearest to ``name``, None if none is near: of a similarity of ``cutoff``, in 0..1, or more."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the allowed name nearest to ``name``, or an empty string if none is near."""
    found = nearest(name, allowed)
    return "" if found is None else f" (did you mean {found!r}?)"


def printable(name: str) -> str:
    r"""A file name as text that can be printed and written anywhere: bytes that are not UTF-8 become ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def listing(names: Sequence[str], most: int = 10) -> str:
    """The names, quoted and separated by commas; of many the first ``most`` and how many more there are."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def check_choice(argument: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of the allowed names.

    Raises:
        ValueError: `value` is not in `allowed`; the message has the nearest name.
    """
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ValueError(f"{argument} is {value!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
