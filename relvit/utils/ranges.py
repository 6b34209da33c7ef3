"""Ranges of numbers that an argument may have, and the check of given arguments against them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Finite numbers from `least` to `most`; both limits are allowed, unless `above` or `below` is set."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, number: Any) -> bool:
        high = number > self.least if self.above else number >= self.least
        low = number < self.most if self.below else number <= self.most
        return high and low and math.isfinite(number)

    def __str__(self) -> str:
        if self.most < math.inf:
            return (
                f"in {self.least:.12g} {'<' if self.above else '<='} x {'<' if self.below else '<='} {self.most:.12g}"
            )
        return "positive" if self.above else f"{self.least:.12g} or more"


def check_in_ranges(ranges: Mapping[str, Range], given: Mapping[str, Any]) -> None:
    """Check arguments, each one number or a sequence of numbers, against the ranges of their names.

    Raises:
        TypeError: A text is given in place of a number, such as '1e-3', which YAML reads as text, or a dict.
        ValueError: A number is out of its range.
    """
    for name, allowed in ranges.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, str | Mapping):
            raise TypeError(f"{name} must be {'a number' if isinstance(value, str) else 'numbers'}, got {value!r}")
        numbers = value if isinstance(value, list | tuple) else [value]
        wrong = [number for number in numbers if isinstance(number, Real) and number not in allowed]
        if wrong:
            # Infinity is a positive number, so for it the message must also say that numbers have to be finite.
            finite = "" if all(map(math.isfinite, wrong)) else "finite and "
            raise ValueError(f"{name} must be {finite}{allowed}, got {value}")
