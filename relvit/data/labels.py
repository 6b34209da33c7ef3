"""Labels as data state them, by names or by numbers, and what they stand for."""

import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from relvit.utils.messages import listing


def as_label(value: Any) -> str | None:
    """A label as a name or a number, in text; None for what stands for no label: None, '' and negative numbers.

    Raises:
        TypeError: Neither text nor a whole number.
    """
    if not isinstance(value, str | int | None):
        raise TypeError(f"{reprlib.repr(value)} is neither the name nor the number of a class")
    text = "" if value is None else str(value).strip()
    return text if text and not re.fullmatch(r"-\d+", text) else None


def classes_of(labels: Iterable[str]) -> list[str]:
    """The different labels in order: by their value where all are numbers, else by the alphabet."""
    different = set(labels)
    return sorted(different, key=int) if all(map(_is_number, different)) else sorted(different)


def positions(labels: Iterable[str], class_names: Sequence[str]) -> dict[str, int]:
    """The position of each class by its label: its name, or, where all labels are numbers and no name is one, the
    position itself."""
    known = {name: position for position, name in enumerate(class_names)}
    if not any(map(_is_number, class_names)) and all(map(_is_number, labels)):
        return {str(position): position for position in known.values()}
    return known


def check_every_class(labels: Iterable[int], class_names: Sequence[str], where: str) -> None:
    """Refuse to train on data in which a class has no image.

    Raises:
        ValueError: There is such a class.
    """
    if absent := set(range(len(class_names))) - set(labels):
        raise ValueError(
            f"{where} has no image of the classes {listing([class_names[i] for i in sorted(absent)])} of "
            "class_names; add some, or leave class_names out to train on the classes that are there"
        )


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdigit()
