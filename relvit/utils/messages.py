"""Texts of messages: the nearest allowed name, short lists of names, articles."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, allowed: Iterable[str], parts: bool = True) -> str | None:
    """Return the allowed name that ``name`` is likely a misspelling of; None if there is none, as guesses mislead.

    Case, spaces, hyphens, underscores and the order of words do not count. In a word, one letter (in long words two, in
    short words often none, see `_most_edits`) may be missing, wrong, added or exchanged with its neighbour. With
    `parts`, one name may also begin or end with the other name, if the other name is a large part of it.
    """
    allowed = list(allowed)
    # PyTorch calls the GPU 'cuda', so suggest this name for 'gpu', which no comparison of letters would find.
    if name in ("gpu", "gpus") and name not in allowed and "cuda" in allowed:
        return "cuda"
    typed = _letters(name)
    spelt = {each: _letters(each) for each in allowed}
    # A number, such as the number of a class, is not a misspelling of another number.
    if name.isdigit():
        return next((each for each, other in spelt.items() if other == typed), None)
    near = [
        (_edits(typed, other), other[:1] != typed[:1], place)
        for place, (each, other) in enumerate(spelt.items())
        if typed == other
        or _words(name) == _words(each)
        or (abs(len(typed) - len(other)) <= 2 and _is_misspelt(name, each))
    ]
    typed = _letters(re.sub(r"(?<=[a-z]{4})s$", "", name))
    long = [each for each, other in spelt.items() if parts and _is_longer(*sorted((typed, other), key=len))]
    # An allowed name that begins with the typed name is a better guess than an allowed name that differs by a letter.
    continued = [each for each in long if spelt[each].startswith(typed)]
    if near and (not continued or min(near)[0] == 0):
        return list(spelt)[min(near)[2]]
    return min(continued or long, key=len, default=None)


def _is_misspelt(typed: str, other: str) -> bool:
    one, two = ([word.casefold() for word in re.split(r"[\s_-]+", name)] for name in (typed, other))
    if len(one) == len(two):
        return all(a == b or _edits(a, b) <= _most_edits(a, b) for a, b in zip(one, two, strict=True))
    # If one name has all words of the other name and further words, as `top_k` beside `top`, the two names mean
    # different things, so neither is a misspelling of the other.
    added = {*one} <= {*two} or {*two} <= {*one}
    joined = "".join(one), "".join(two)
    return not added and _edits(*joined) <= min(1, _most_edits(*joined))


def _most_edits(typed: str, other: str) -> int:
    """Return how many faults a misspelling may have: few in a short word, or where the first letter is another."""
    # In a number, such as the day in the name of a run's folder, one digit may be wrong.
    if typed.isdigit() and other.isdigit():
        return 1
    # In a word of three letters, one wrong letter makes another word, such as 'ema' for 'eta'. So all its letters must
    # occur in the other word.
    if len(typed) < 4:
        return int(len(typed) == 3 and {*typed} <= {*other})
    same = typed[:1] == other[:1]
    return 1 + (same and len(typed) > 6) - (not same and len(typed) == 4)


def _words(name: str) -> list[str]:
    return sorted(re.split(r"[\s_-]+", name.casefold()))


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def _is_longer(short: str, long: str) -> bool:
    """Return whether one name begins with a large part of the other name, or ends with most of it.

    Two names that only begin alike, such as `cutmix_prob` and `cutmix_minmax`, mean different things.
    """
    begins = long.startswith(short) and len(short) >= max(5, 0.4 * len(long))
    return begins or (long.endswith(short) and len(short) >= max(5, 0.6 * len(long)))


def _edits(one: str, other: str) -> int:
    """Count the letters to insert, delete or replace, and the neighbours to exchange, between two names."""
    before, above = [], list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        line = [row]
        for column, wanted in enumerate(other, 1):
            best = min(above[column] + 1, line[-1] + 1, above[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and (letter, one[row - 2]) == (other[column - 2], wanted):
                best = min(best, before[column - 2] + 1)
            line.append(best)
        before, above = above, line
    return above[-1]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the allowed name nearest to ``name``, or '' if none is near."""
    found = nearest(name, allowed)
    return "" if found is None else f" (did you mean {found!r}?)"


def an(name: str) -> str:
    """Return a name after its article: 'an ImageEncoderViT', 'a Linear', 'an LSHAttention'."""
    return f"{'an' if re.match('[aeioAEIO]|[FHLMNRX][A-Z]', name) else 'a'} {name}"


def full_name(cls: type) -> str:
    """Return a class with its module: several classes of timm have the same name, such as Attention."""
    return f"{cls.__module__}.{cls.__qualname__}"


def listing(names: Sequence[str], most: int = 10) -> str:
    """Join quoted names by commas; of many names the first ``most``, and how many more there are."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def part_of(name: str) -> str:
    """Return the expression for the part of this name, such as 'blocks.0.attn', of a module in the variable `model`."""
    return "model" + "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in name.split("."))


def check_choice(argument: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError for a value that is not one of the allowed names; the message gives the nearest of them, too."""
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ValueError(f"{argument} is {value!r}; allowed are {', '.join(map(repr, allowed))}{hint}")


def check_names(function: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise TypeError for a keyword argument that a function lacks."""
    for name in given:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise TypeError(f"{function} has no argument {name!r}{hint}, allowed: {listing(allowed, len(allowed))}")


def with_near_names(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise TypeError for unknown keyword arguments, with the nearest of its own names."""
    allowed = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(function.__name__, kwargs, allowed)
        return function(*args, **kwargs)

    return checked
