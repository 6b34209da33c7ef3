"""Type hints of options: whether a value has the type, its name in words, the names and classes that it allows."""

from __future__ import annotations

import inspect
import types
from argparse import ArgumentError
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from relvit.app.cli.config_text import MODE

WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "name: value pairs",
    tuple: "a pair such as '[64,96]'",
}


def accepts(hint: Any, value: Any) -> bool:
    """Return whether jsonargparse takes a value, such as the text of a command line, for an option of that type."""
    probe = ArgumentParser(exit_on_error=False, parser_mode=MODE)
    probe.add_argument("--value", type=hint)
    try:
        probe.parse_object({"value": value})
    # Python raises OverflowError if an integer is too large for a float, so the option does not take it.
    except (ArgumentError, OverflowError):
        return False
    return True


def item_type(hint: Any) -> Any:
    """Return the type of the items if an option takes a list or tuple of values, otherwise None."""
    return next((get_args(part)[0] for part in _alternatives(hint) if get_origin(part) in (list, tuple)), None)


def takes_one(hint: Any) -> bool:
    """Return whether an option takes a single value; some options, such as `img_size`, take a list as well."""
    return any(get_origin(part) not in (list, tuple) for part in _alternatives(hint))


def _alternatives(hint: Any) -> list[Any]:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint]
    return [part for part in parts if part is not type(None)]


def choices(hint: Any) -> list[str]:
    """Return the strings that a type allows by name."""
    if get_origin(hint) is Literal:
        return [part for part in get_args(hint) if isinstance(part, str)]
    return [choice for part in get_args(hint) for choice in choices(part)]


def in_words(hint: Any) -> str:
    """Name a type as users know it."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return in_words(parts[0])
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(in_words, _alternatives(hint))))
    if kind is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if parts and (kind is list or parts[1:] == (...,)):
        item = in_words(parts[0])
        return f"one or several of {item.removeprefix('one of ')}" if choices(parts[0]) else f"values, each {item}"
    return WORDS.get(kind, kind.__name__)


def subclasses(hint: Any) -> dict[str, type]:
    """Map names to the classes that an option takes, subclasses included; empty for an option of plain values."""
    parts = [hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))]
    # From Python 3.11 on `Any` is a class, but one that no user chooses, so leave it out.
    classes = [part for part in parts if inspect.isclass(part) and part is not Any and not get_args(part)]
    classes = [part for part in classes if part.__module__ != "builtins"]
    # The loop appends subclasses to the list that it iterates over, so it also visits subclasses of subclasses.
    for cls in classes:
        classes += cls.__subclasses__()
    return {cls.__name__: cls for cls in classes}
