"""Options on a command line that are looked at before it is parsed."""

from __future__ import annotations

from collections.abc import Sequence


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value given for an option, as `--name value` or `--name=value`."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == name and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
    return value


def without(arguments: Sequence[str], name: str) -> list[str]:
    """All arguments but an option with its value."""
    rest, skip = [], False
    for argument in arguments:
        if skip or argument.startswith(f"{name}="):
            skip = False
        elif argument == name:
            skip = True
        else:
            rest.append(argument)
    return rest
