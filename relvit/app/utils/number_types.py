"""Types of numbers: `Annotated[float, Range(0)]` says what an argument may be, `check_ranges` checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from relvit.utils.ranges import Range, check_in_ranges

PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, above=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
OpenShare = Annotated[float, Range(0, 1, above=True, below=True)]
# A larger number must be a mistake, because no device can hold such a batch.
BatchSize = Annotated[int, Range(1, 65536)]
# A larger number must be a mistake, because each worker is a process.
Workers = Annotated[int, Range(0, 1024)]

Port = Annotated[int, Range(0, 65535)]


def check_ranges(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check arguments, numbers or sequences of numbers, against the ranges in the types of a function's parameters.

    Raises:
        ValueError: A number is out of its range.
    """
    check_in_ranges(ranges_of(function), given)


@cache
def ranges_of(function: Callable[..., Any]) -> dict[str, Range]:
    """Return the range of each parameter of a function whose type has one, also within a union or a list."""
    hints = get_type_hints(function, include_extras=True)
    return {name: found for name, hint in hints.items() if (found := _range_in(hint)) is not None}


def _range_in(hint: Any) -> Range | None:
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        found = part if isinstance(part, Range) else _range_in(part)
        if found is not None:
            return found
    return None
