"""The parser of all commands, and its complaints in the user's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace, auto_cli
from lightning.pytorch.cli import LightningArgumentParser

from relvit.cli.aliases import ALIASES
from relvit.cli.config_text import MODE
from relvit.cli.errors import NOISE, UsageError
from relvit.cli.help import USAGE
from relvit.data.modules.registry import data_modules
from relvit.utils.messages import did_you_mean, listing

NO_DATA = "no data given: give --root DIR, which holds train/CLASS/IMAGE, or --data NAME, or --config FILE"
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "tuple": "a pair such as '[64,96]'",
    "list": "a list such as '[64,96]' or '[a.ckpt,b.ckpt]'",
    "dict": "name: value pairs",
}


class Parser(LightningArgumentParser):
    """Raises `UsageError`, with the nearest right name, where the stock parser prints its usage and exits.

    Options must be spelt out: an abbreviation that works today is another option's tomorrow.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "description": "", "parser_mode": MODE, **kwargs})

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:
        """Parse; a file that is no text, and a number that is no float, are the user's mistakes, too."""
        try:
            return super().parse_args(*args, **kwargs)
        except UnicodeDecodeError as error:
            raise UsageError(f"--config: the file is not UTF-8 text ({error.reason} at byte {error.start})") from error
        except OverflowError as error:
            raise UsageError(f"a number is too large: {error}") from error

    def error(self, message: str, ex: Exception | None = None) -> None:
        raise UsageError(explain_parser_error(self, message)) from ex


def run_function(function: Callable[..., Any], command: str, arguments: Sequence[str]) -> Any:
    """Run a function whose arguments are the options of a command, and return its result."""
    program = f"relvit {command}"
    return auto_cli(function, args=list(arguments), prog=program, as_positional=False, parser_class=Parser)


def explain_parser_error(parser: ArgumentParser, message: str) -> str:
    """A parser's error message, shortened, with the nearest right name for an option that does not exist.

    The parser tries every type that an option may have and reports all of them, nested; the innermost complaint is the
    one that the user can act on.
    """
    known = [f"--{name}" for name in known_options(parser)]
    known += [short for table in ALIASES.values() for short, own in table.items() if own in known and "." not in short]
    data_classes = {cls.__name__ for cls in data_modules()}
    if unknown := re.search(r"[Uu]nrecognized arguments: (\S+)", message):
        flag = unknown[1].split("=")[0]
        if flag in known:  # an option of the data, of which none was chosen
            return NO_DATA
        return f"unknown option {flag}{did_you_mean(flag, known)}"
    if file := re.fullmatch(r'Parser key "config": (.+)', message):
        return f"--config: {file[1]}"
    if key := re.search(r"Option '([\w.]+)' is not accepted|does not accept option '([\w.]+)'", message):
        name = key[1] or key[2]
        return f"unknown option {name}{did_you_mean(name, (option.lstrip('-') for option in known))}"
    if name := re.search(r"Expected a dot import path string: (\S+)", message):
        return f"unknown data {name[1]!r}{did_you_mean(name[1], data_classes)}; known: {listing(sorted(data_classes))}"
    if re.search(r"arguments are required: (\w+\.)?data\b|ImageData is abstract", message):
        return NO_DATA
    if missing := re.search(r"(- )?the following arguments are required: (.+)", message):
        nested = "data." if missing[1] else ""
        usage = USAGE.get(parser.prog.removeprefix("relvit "))
        names = ", ".join(f"--{nested}{name}" for name in missing[2].split(", "))
        return f"missing: {names}" + (f"; usage: {' or '.join(usage)}" if usage else "")

    keys = re.findall(r'Parser key "([\w.]+)"', message)
    complaints = [line.strip().removeprefix("- ") for line in message.splitlines()]
    complaints = [line for line in complaints if line and not re.match(NOISE, line)]
    if not complaints:
        return message
    expected = r"Expected an? (.+?)\.?(?: Got value: .*)?"
    wanted = [found[1] for line in complaints if (found := re.fullmatch(expected, line))]
    given = re.search(r"(?:Got value|Given value): (?!NestedArg)(.+)", message)
    if len(wanted) == len(complaints) and given:
        types = " or ".join(dict.fromkeys(map(_readable, wanted)))
        return f"--{'.'.join(dict.fromkeys(keys))} must be {types}, got {given[1]}"
    return "; ".join(_nested(line, "".join(f"{key}." for key in keys)) for line in complaints)


def _nested(line: str, prefix: str) -> str:
    """A complaint of the parser of a nested class, which does not know under which name it is nested."""
    if line.startswith("unknown option "):
        name = re.sub(r"unknown option -*([\w.]+).*", r"\1", line)
        if prefix == "data." and (owners := [cls.__name__ for cls in data_modules() if name in cls.argument_names()]):
            have = f"{listing(sorted(owners))} {'has' if len(owners) == 1 else 'have'} it"
            return f"unknown option --data.{name}: {have}; name the data (--data NAME) before its options"
        return re.sub(r"(^unknown option |did you mean ')-*", rf"\1--{prefix}", line)
    return f"--{prefix}{line.removeprefix('--')}" if line.startswith("--") else line


def _readable(wanted: str) -> str:
    """A type as the parser prints it, in words."""
    named = re.fullmatch(r"<class '([\w.]+)'>", wanted)
    return WORDS.get(named[1], named[1]) if named else wanted.replace("typing.Literal", "one of ")


def known_options(parser: ArgumentParser) -> list[str]:
    """All options of a parser and its commands, those of the data modules included."""
    names = set()
    for action in parser._actions:
        names |= {string.lstrip("-") for string in action.option_strings}
        choices = action.choices if isinstance(action.choices, dict) else {}
        for sub in choices.values():
            names |= set(known_options(sub))
        if action.dest == "data":
            for data in data_modules():
                names |= {f"data.{name}" for name in data.argument_names()}
    return sorted(names)
