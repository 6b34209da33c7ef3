"""Limit depth and size of nested JSON or YAML values from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEEPEST, MOST_VALUES = 32, 10**6


def check_bounds(value: Any, source: str) -> None:
    """Refuse nested dictionaries, lists and tuples that are too deep or hold too many values in all.

    A checkpoint may store a list once and refer to it many times, also within a list to which it refers many times. So
    a few kilobytes can represent more values than any memory holds, and a loop over them would not end. This function
    therefore counts a value each time it occurs.

    Args:
        value: the description of a model, its data or its training.
        source: the file, for the message.

    Raises:
        ValueError: `value` has more than `DEEPEST` levels, or holds more than `MOST_VALUES` values.
    """
    waiting, count = [(value, 0)], 1
    while waiting:
        inner, depth = waiting.pop()
        if not isinstance(inner, Mapping | list | tuple):
            continue
        count += len(inner)
        if count > MOST_VALUES or depth >= DEEPEST:
            raise ValueError(
                f"{source} describes more than {DEEPEST} levels or {MOST_VALUES:,} values, which relvit never writes: "
                "take another file"
            )
        items = inner.values() if isinstance(inner, Mapping) else inner
        waiting += ((item, depth + 1) for item in items)
