"""Run a command that is a function: the arguments of the function are the command's options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from relvit.app.cli.errors import UsageError
from relvit.app.cli.help import usage
from relvit.app.cli.mistakes import required
from relvit.app.cli.parser import Parser
from relvit.app.cli.typed_words import Arguments
from relvit.utils.ranges import check_ranges


def function_of(module: str, command: str) -> Callable[..., Any]:
    """Return the function that runs a command."""
    return getattr(importlib.import_module(module), command.replace("-", "_"))


def run_function(command: str, function: Callable[..., Any], given: Arguments) -> None:
    """Call the function of a command with the options that were given, or the `main` beside the function.

    Raises:
        UsageError: an option is missing, unknown or of the wrong type.
        ValueError: a number is out of the range of its option.
    """
    if hasattr(module := inspect.getmodule(function), "main"):
        module.main(given)
        return
    missing = [f"--{name}" for name in required(function) if name not in given.values]
    # A missing option may be among the given ones under a name that the parser does not know, and explains.
    known = {name.partition(".")[0] for name in given.values} <= inspect.signature(function).parameters.keys()
    if missing and known:
        raise UsageError(f"missing: {', '.join(missing)}; usage: {' or '.join(usage(command, function))}")
    parser = Parser(prog=f"relvit {command}")
    parser.add_argument("--config", action="config", help="A file of options in YAML.")
    parser.add_options_of(function)
    options = parser.instantiate_classes(parser.parse_args(given.words, given.lists())).as_dict()
    del options["config"]
    check_ranges(function, options)
    function(**options)
