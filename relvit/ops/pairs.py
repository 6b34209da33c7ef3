"""Arguments that are one integer for both axes, or one per axis."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral


def int_pair(name: str, given: int | Sequence[int], least: int) -> tuple[int, int]:
    """The argument `given`, integers of Python or NumPy, as (rows, columns); `name` is what error messages call it.

    Raises:
        TypeError: anything but integers.
        ValueError: not one or two of them, or one below `least`.
    """
    pair = tuple(given) if isinstance(given, Sequence) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an int or (rows, columns), got {given!r}")
    for number in pair:
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise TypeError(f"{name} must hold integers, got {given!r}")
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {given!r}")
    return int(pair[0]), int(pair[1])
