"""The command line `relvit COMMAND ...`: `main`, and the exit statuses; `relvit_start` has the table of commands."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relvit.app.cli.errors import describe, is_self_explanatory, is_users_mistake, without_parser
from relvit.app.cli.typed_words import Arguments, read_arguments
from relvit.app.utils.shown_text import visible_lines
from relvit_start import COMMANDS, answer

_stock_format = warnings.formatwarning


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (it failed), 2 (wrong use), or the status of a signal."""
    for stream in (sys.stdout, sys.stderr):
        # If the output's encoding lacks a character (of a file's name, say, or a sign such as ±), print an escape. By
        # default, Python would raise UnicodeEncodeError.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    # Leave `--max_pixels` to the function of `relvit demo`, which has an option of this name with a smaller default.
    if arguments[:1] != ["demo"]:
        arguments, pixels = _without(arguments, "--max_pixels")
        if pixels is not None:
            if not re.fullmatch(r"[1-9]\d{0,17}", pixels):
                print(f"relvit: error: --max_pixels must be a whole number, 1 or more, got {pixels!r}", file=sys.stderr)
                return 2
            os.environ["RELVIT_MAX_PIXELS"] = pixels
    if (status := answer(arguments)) is not None:
        return status

    command, *rest = arguments
    given = Arguments([], {}, {})
    try:
        # These imports load Lightning, which takes seconds. `--help`, `--version` and unknown commands do not wait for
        # the imports, because `answer` above has handled such command lines.
        from relvit.app.cli.functions import function_of, run_function
        from relvit.app.cli.help import short_help

        function = function_of(COMMANDS[command][0], command)
        given = read_arguments(command, function, rest)
        if "help" in given.values:
            print(short_help(command, function))
            return 0
        # Importing Lightning sets up Lightning's logging, so change the log levels after the import.
        quieten()
        run_function(command, function, given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        # The program that reads the output has ended (`relvit ... | head`): discard the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        reason = without_parser(error)
        status = 2 if is_users_mistake(reason) else 1
        if debug:
            # Do not let Python print the traceback: `visible_lines` removes passwords that stand in addresses.
            print(visible_lines("".join(traceback.format_exception(error))), file=sys.stderr, end="")
            return status
        message = visible_lines(given.as_typed(describe(reason, command)))
        print(f"relvit {command}: error: {message}", file=sys.stderr)
        if not is_self_explanatory(reason):
            print("(with --debug it shows where this happened)", file=sys.stderr)
        return status
    return 0


def _without(arguments: list[str], option: str) -> tuple[list[str], str | None]:
    """Remove an option of all commands from the arguments; return the other arguments, and the option's value."""
    for at, word in enumerate(arguments):
        if word == option:
            return arguments[:at] + arguments[at + 2 :], "".join(arguments[at + 1 : at + 2])
        if word.startswith(f"{option}="):
            return arguments[:at] + arguments[at + 1 :], word.removeprefix(f"{option}=")
    return arguments, None


def quieten() -> None:
    """Silence warnings about which a user of the command line can do nothing, and shorten relvit's warnings.

    Lightning advertises products, suggests numbers of workers, and warns of calls that Lightning itself makes.
    Matplotlib warns if its font lacks a character of a class name.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    warnings.formatwarning = format_warning
    if rank_zero_only.rank != 0:
        # Every process reads the same data and would repeat the same warnings, so show only the warnings of the main
        # process.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"relvit\.")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for text in (
        "does not have many workers",
        "suggested max number of worker",
        "smaller than the logging interval",
        "isinstance.treespec, LeafSpec",
        "Be aware that when using `ckpt_path`, callbacks",
        "The dirpath has changed",
        # Ignore this warning, because relvit does not use Lightning's indices of the images in a batch.
        "Couldn't infer the batch indices",
        # Ignore this warning, because relvit's data modules can resume a training within an epoch.
        "You're resuming from a checkpoint that ended before the epoch ended",
        "Glyph .* missing from font",
    ):
        warnings.filterwarnings("ignore", message=f".*{text}")


def format_warning(message: Warning | str, category: type, filename: str, *place: Any) -> str:
    """Format a warning of relvit as a sentence, without a place in the code, and other warnings as Python does."""
    if Path(filename).is_relative_to(Path(__file__).parents[2]) and category is UserWarning:
        return f"Warning: {visible_lines(str(message))}\n"
    return _stock_format(message, category, filename, *place)
