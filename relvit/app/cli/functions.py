"""Run a command that is a function, whose arguments are the options; `relvit_start.COMMANDS` lists the commands."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from relvit.app.cli.errors import UsageError
from relvit.app.cli.help import usage
from relvit.app.cli.mistakes import required
from relvit.app.cli.parser import Parser
from relvit.app.cli.typed_words import Arguments, parts
from relvit.app.data.registry import named_data_module
from relvit.app.utils.number_types import check_ranges


def function_of(module: str, command: str) -> Callable[..., Any]:
    """Return the function that runs a command."""
    return getattr(importlib.import_module(module), command.replace("-", "_"))


def run_function(command: str, function: Callable[..., Any], given: Arguments) -> None:
    """Call the function of a command (or `main` in the function's module) with the given options.

    Raises:
        UsageError: an option is missing, unknown or of the wrong type.
        ValueError: a number is out of the range of its option.
    """
    if (main := parts(function)[0]) is not function:
        own = inspect.signature(main).parameters
        main(given, **{name: value for name, value in given.values.items() if name in own})
        return
    missing = [f"--{name}" for name in required(function) if name not in given.values]
    # An unknown option may be a misspelling of the missing option, so let the parser explain unknown options first.
    known = {name.partition(".")[0] for name in given.values} <= inspect.signature(function).parameters.keys()
    if missing and known:
        raise UsageError(f"missing: {', '.join(missing)}; usage: {' or '.join(usage(command, function))}")
    parser = Parser(prog=f"relvit {command}")
    parser.add_argument("--config", action="config", help="A file of options in YAML.")
    parser.add_options_of(function)
    of_data = takes_data_args(function) and [word for word in given.words if word.startswith("--data.")]
    words = [word for word in given.words if not of_data or word not in of_data]
    options = parser.instantiate_classes(parser.parse_args(words, given.lists())).as_dict()
    # Files of `--config` have replaced these lists, which the parser takes as defaults, so put the lists back.
    options |= given.lists().as_dict()
    del options["config"]
    check_ranges(function, options)
    if of_data:
        options["data_args"] = data_args(command, options["data"], of_data)
    function(**options)


def takes_data_args(function: Callable[..., Any]) -> bool:
    """Return whether `--data` of a command is the name of a data module, whose options `data_args` are."""
    return "data_args" in inspect.signature(function).parameters


def data_args(command: str, name: str | None, words: Sequence[str]) -> dict[str, Any]:
    """Parse the options `--data.OPTION=VALUE` by the types in the constructor of the data module that `--data` names.

    Raises:
        UsageError: no option names the data module, or an option is unknown or has the wrong type.
    """
    if (cls := named_data_module(name)) is None:
        option = words[0].partition("=")[0]
        raise UsageError(f"{option} needs --data NAME: give the data module of the training, such as my_module.Mine")
    parser = Parser(prog=f"relvit {command}")
    parser.add_class_arguments(cls, "data", as_group=False, fail_untyped=False)
    for action in parser._actions:
        # Return only the options that are given: all other options keep the values in the checkpoint.
        action.default, action.required = argparse.SUPPRESS, False
    return parser.parse_args(words).data.as_dict()
