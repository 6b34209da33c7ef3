"""Class labels of lists and readers: map names or numbers to indices in class_names, find likely misspellings."""

import difflib
import re
import reprlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.shown_text import undecoded, visible
from relvit.utils.messages import listing

# A label is the index of an image's class in the list of class names, or, for a multi-label image, the sorted indices
# of its classes.
Label = int | tuple[int, ...]

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def as_label(value: Any) -> str | None:
    """Convert a label, a name or a number, to text; None, '' and negative numbers mean no label and return None.

    Raises:
        TypeError: The label is neither text nor an integer.
    """
    if not isinstance(value, str | int | None):
        raise TypeError(f"{reprlib.repr(value)} is not a label: give the name (text) or the number (int) of a class")
    text = "" if value is None else str(value).strip()
    return text if text and not re.fullmatch(r"-\d+", text) else None


def classes_of(labels: Iterable[str]) -> list[str]:
    """Sort the distinct labels: by value if all are numbers, also negative or fractional numbers, otherwise as text."""
    different = sorted(set(labels))
    return sorted(different, key=float) if all(map(_NUMBER.fullmatch, different)) else different


def positions(labels: Iterable[str], class_names: Sequence[str]) -> dict[str, int]:
    """Map labels to indices of classes: by name, or by number where all labels are numbers and no class name is one."""
    known = {name: position for position, name in enumerate(class_names)}
    if not any(map(_is_number, class_names)) and all(map(_is_number, labels)):
        return {str(position): position for position in known.values()}
    return known


def check_every_class(labels: Iterable[int], class_names: Sequence[str], where: str) -> None:
    """Refuse training data in which a class has no image.

    Raises:
        ValueError: A class has no image.
    """
    if absent := set(range(len(class_names))) - set(labels):
        raise ValueError(
            f"{where} has no image of the classes {listing([class_names[i] for i in sorted(absent)])} of "
            "class_names; add some, or leave class_names out to train on the classes that are there"
        )


def classes_in(label: Label) -> tuple[int, ...]:
    """Return the indices of the classes of an image: one index, or several for a multi-label image."""
    return label if isinstance(label, tuple) else (label,)


def label_text(label: Label, class_names: Sequence[str]) -> str:
    """Return the name of an image's class; join the names of the classes of a multi-label image with ';'."""
    return ";".join(class_names[position] for position in classes_in(label))


def target_of(label: Label, num_classes: int) -> int | np.ndarray:
    """Convert a label to the target of a loss: the class index, or bool (num_classes,) for a multi-label image."""
    if isinstance(label, int):
        return label
    target = np.zeros(num_classes, bool)
    target[list(label)] = True
    return target


def label_of(target: int | np.ndarray) -> Label:
    """Convert a target back to a label, see `target_of`."""
    return tuple(np.flatnonzero(target)) if isinstance(target, np.ndarray) else target


def rarest(labels: Sequence[Label]) -> list[int]:
    """Return for each image which of its classes has the fewest images; -1 for an image without classes."""
    counts = Counter(position for label in labels for position in classes_in(label))
    return [min(classes_in(label), key=lambda position: (counts[position], position), default=-1) for label in labels]


def class_counts(labels: Iterable[Label], class_names: Sequence[str]) -> dict[str, int]:
    """Count the images of each class."""
    counts = Counter(chain.from_iterable(map(classes_in, labels)))
    return {name: counts[position] for position, name in enumerate(class_names)}


def counts_text(counts: Mapping[str, int]) -> str:
    """Name classes with numbers of images, such as 'cat 90, dog 80'; if many, only the smallest and the largest."""
    if len(counts) <= 12:
        return _counted(counts, counts)
    ordered = sorted(counts, key=lambda name: counts[name])
    few, many = _counted(counts, ordered[:4]), _counted(counts, ordered[:-5:-1])
    return f"{len(counts)} classes, fewest: {few}; most: {many}"


def _counted(counts: Mapping[str, int], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {counts[name]:,}" for name in names)


# The name of a class may be a typo of another class name if the other class has at least _RARER times as many images.
# Only the _COMPARED rarest classes are checked, because comparing all names with each other would be slow.
_RARER, _COMPARED = 20, 50


def doubtful_classes(counts: Mapping[str, int]) -> list[str]:
    """Describe likely spellings of one class: names that differ in case or spaces, rare names near frequent ones."""
    alike = defaultdict(list)
    for name in counts:
        words = re.sub(r"[\s_-]+", "", unicodedata.normalize("NFKC", name).casefold())
        alike[float(name) if _NUMBER.fullmatch(name) else words].append(name)
    doubts = [
        f"the classes {listing(group)} differ in case, spaces, hyphens, zeros of a number or accents' encoding alone: "
        "give them one name if they are one class"
        for group in alike.values()
        if len(group) > 1
    ]
    for name in sorted(counts, key=lambda name: counts[name])[:_COMPARED]:
        # Leave out names with digits, because names that differ only in a digit, such as 'type 1' and 'type 2', are not
        # typos.
        if len(name) < 3 or re.search(r"\d", name):
            continue
        larger = [other for other in counts if other[:1] == name[0] and counts[other] >= _RARER * counts[name] > 0]
        # With this cutoff names match if one letter is added, missing, wrong or in another place. In long names a
        # little more may differ.
        for other in difflib.get_close_matches(name, larger, 1, min(1 - 1 / len(name), 0.85) - 1e-9):
            doubts.append(f"the class {name!r} (images: {counts[name]}) may be a typo of {other!r} ({counts[other]:,})")
    return doubts


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdigit()


def name_text(name: Any) -> str:
    """Return the name of a class as text; a class of torchvision's ImageNet has several names."""
    return ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)


def names_in(class_names: Iterable[Any]) -> list[str]:
    """Return the names of classes as a list of texts.

    Raises:
        TypeError: `class_names` is one text, whose letters would become classes, or a dict.
        ValueError: a name comes twice.
    """
    if isinstance(class_names, str | Mapping):
        raise TypeError(
            "class_names must be a list with the name of each class, label 0 first, such as ['cat', 'dog'], got "
            f"{reprlib.repr(class_names)}"
        )
    names = [name_text(name) for name in class_names]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"class_names holds {', '.join(map(repr, twice))} more than once; name each class once")
    return names


def known_names(given: Sequence[str] | None, data: Any) -> list[str] | None:
    """Return the names of a classifier's classes: the given names, or else the names that its data module has."""
    names = attribute_of(data, "class_names") if given is None else given
    return None if names is None else names_in(names)


def checked_classes(class_names: Sequence[str]) -> list[str]:
    """Return the names of classes, which may be numbers or texts of NumPy, as a list of texts.

    Raises:
        TypeError: `class_names` is one text, or a dict.
        ValueError: There are fewer than two names, a name comes twice, or a name cannot be printed.
    """
    names = names_in(class_names)
    check_printable(names, "class_names")
    if len(names) < 2:
        raise ValueError(f"classification needs two or more classes, got {names}; add images of another class")
    return names


def check_printable(class_names: Iterable[str], source: str) -> None:
    """Refuse names of classes that are not UTF-8, or contain control characters, which a terminal would execute.

    Args:
        class_names: The names.
        source: Where the names come from, for the message.

    Raises:
        ValueError: A name is not UTF-8 or holds control characters.
    """
    for name in class_names:
        if visible(name) != name:
            fault = undecoded(name) or "has control characters; rename it"
            raise ValueError(f"{visible(source)}: the class name '{visible(name)}' {fault}")


def check_class_names(given: Sequence[str] | None, own: Sequence[str], whose: str) -> None:
    """Refuse given class names that differ from the data's class names.

    Raises:
        ValueError: `given` is not None and differs from `own`.
    """
    if given is not None and list(given) != list(own):
        raise ValueError(
            f"class_names is {listing(list(given))}; {whose} the classes {listing(list(own))}: "
            "leave it out, or use the data that the checkpoint was trained on"
        )
