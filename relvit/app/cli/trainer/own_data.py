"""Options that a user's data module inherits, with the defaults that it sets; its name on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_type_hints

from jsonargparse import ArgumentParser

from relvit.app.cli.config_text import read_config
from relvit.app.data import ImageData


def open_inherited_options(parser: ArgumentParser, cls: type[ImageData], key: str | None) -> None:
    """Pass the options that a user's class takes as ``**options`` to the class only if the user gives them.

    By default, the parser passes the default of every option to the class. The defaults of relvit's class would then
    replace defaults that the user's class sets, for example by `options.setdefault`. If jsonargparse cannot see how the
    user's class uses ``**options``, it adds no such options to the parser, so this function adds them.
    """
    prefix = "" if key is None else f"{key}."
    actions = {action.dest: action for action in parser._actions}
    inherited = {name: part for name, (_, part) in cls.arguments().items() if name not in cls.names_to_restore()}
    found = [actions[f"{prefix}{name}"] for name in inherited if f"{prefix}{name}" in actions]
    for action in found:
        action.default, action.required = argparse.SUPPRESS, False
    if not found:
        for name, part in inherited.items():
            hint = get_type_hints(part.__init__, include_extras=True)[name]
            parser.add_argument(f"--{prefix}{name}", type=hint, default=argparse.SUPPRESS)


def data_in(words: Sequence[str]) -> str | None:
    """Return the data module that a command line names, by an option or by the last configuration that has one."""
    found = None
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name == "config" and value:
            data = read_config(value).get("data")
            found = (data.get("class_path") if isinstance(data, dict) else data) or found
    given = [word.partition("=")[2] for word in words if word.startswith("--data=")]
    return [found, *given][-1]
