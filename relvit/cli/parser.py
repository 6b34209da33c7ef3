"""Parse a command's options by jsonargparse, and explain a refusal by the option or value that is wrong."""

from __future__ import annotations

import importlib
import inspect
import types
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from relvit.cli.aliases import ALIASES, SYNONYMS, USAGE
from relvit.cli.config_text import MODE, load_config
from relvit.cli.errors import UsageError
from relvit.cli.secrets import without_masks
from relvit.cli.shipped_configs import shipped_configs
from relvit.data.modules.registry import data_modules
from relvit.models import model_arguments
from relvit.utils.messages import did_you_mean, listing
from relvit.utils.ranges import check_ranges

NO_DATA = "no data given: give --root DIR, which holds train/CLASS/IMAGE, or --data NAME, or --config FILE"
# Of whose arguments one may be written as an option: relvit's models, one of each kind.
FAMILIES = ("relvit_small", "relvit_aft_conv_small", "relvit_lsh_small", "relvit_universal_small")
WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "name: value pairs",
}
WORDS |= {tuple: "a pair such as '[64,96]'"}


# Options that several commands have, where the docstring of a command does not describe the option.
SHARED = {
    "ckpt_path": "The checkpoint to use, such as runs/RUN/checkpoints/best.ckpt.",
    "reach": "How attention works at other sizes than in training; see docs/sizes.md.",
    "img_size": "The size of the images that the model gets, such as 288 or [256,384]; None means as in training.",
    "batch_size": "The number of images in a batch; None means as in training.",
    "root": "The folder of the images, where it is not the one that the checkpoint remembers.",
    "output": "A file for the figures that ends in .csv, .json or .png (curves), or a folder for all three.",
    "device": "The device that computes, such as cpu or cuda:1; auto takes an accelerator if there is one.",
}


class Parser(LightningArgumentParser):
    """Raise `UsageError` where the stock parser prints its usage and exits.

    Options must be spelt out: an abbreviation that works today is another option's tomorrow.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"allow_abbrev": False, "description": "", "parser_mode": MODE}
        super().__init__(*args, **{**defaults, **kwargs, "exit_on_error": False})

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **kwargs: Any
    ) -> Namespace:
        """Parse arguments; the options begin with the values of a namespace, such as those of a checkpoint."""
        try:
            return super().parse_args(args, namespace, **kwargs)
        except (ArgumentError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise UsageError(explain(self, args or (), namespace, error)) from error

    def add_options_of(self, function: Callable[..., Any], skip: Collection[str] = ()) -> None:
        """Add the arguments of a command's function as options."""
        self.add_function_arguments(function, as_group=False, skip={*skip})
        for action in self._actions:
            if action.dest in SHARED and not action.help:
                action.help = SHARED[action.dest]

    def instantiate_classes(self, cfg: Namespace, **kwargs: Any) -> Namespace:
        """Make the objects of a command's configuration, which holds `***` where its record was to keep no secret."""
        if "trainer" in cfg:
            cfg = cfg.clone()
            cfg.trainer.logger = without_masks(cfg.trainer.logger)
        return super().instantiate_classes(cfg, **kwargs)


def function_of(module: str, command: str) -> Callable[..., Any]:
    """Return the function that runs a command: its arguments are the options."""
    return getattr(importlib.import_module(module), command.replace("-", "_"))


def run_function(module: str, command: str, arguments: Sequence[str], lists: Mapping[str, list[str]]) -> None:
    """Run a command whose options are the arguments of its function.

    Args:
        module: holds the function.
        command: its name.
        arguments: the command line, in the form '--name=value'.
        lists: values of options that take several.
    """
    function = function_of(module, command)
    given = {argument.partition("=")[0] for argument in arguments} | {f"--{name}" for name in lists}
    missing = [f"--{name}" for name in _required(function) if f"--{name}" not in given]
    if missing and given.isdisjoint(("--config", "--help", "--print_config")):
        raise UsageError(f"missing: {', '.join(missing)}; usage: {' or '.join(USAGE[command])}")
    parser = Parser(prog=f"relvit {command}")
    parser.add_argument("--config", action="config", help="A file of options in YAML.")
    parser.add_options_of(function)
    options = parser.instantiate_classes(parser.parse_args(arguments, Namespace(lists))).as_dict()
    del options["config"]
    check_ranges(function, options)
    function(**options)


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [parameter.name for parameter in named if parameter.default is parameter.empty]


class Given(NamedTuple):
    """An option such as 'model.lr' that was given, its value, and the configuration that holds it, if one does."""

    name: str
    value: Any
    file: str | None = None


def explain(parser: ArgumentParser, arguments: Sequence[str], namespace: Namespace | None, error: Exception) -> str:
    """Find the first option that a parser does not have, or whose value is of another type than the option.

    The parser's own message, which reports all types that it has tried, is the last resort.

    Args:
        parser: which refused.
        arguments: the command line.
        namespace: the values of a checkpoint, with which the options began; None without a checkpoint.
        error: of the parser.
    """
    known = option_types(parser)
    needs_data = "model.lr" in known
    try:
        of_checkpoint = {} if namespace is None else namespace.as_dict()
        given = [*_in_file(of_checkpoint, "the checkpoint", known), *_given(arguments, known)]
    except UsageError as wrong:
        return str(wrong)
    # A configuration may leave a value open, as null.
    names = {option.name for option in given if option.value is not None or option.file is None}
    missing = []
    for option in given:
        if (cls := _class_named(known.get(option.name), option.value)) is not None:
            probe = Parser()
            probe.add_class_arguments(cls, option.name, fail_untyped=False)
            known = option_types(probe) | known
            required = [f"{option.name}.{name}" for name in _required(cls)]
            short = {own: alias for alias, own in ALIASES["fit"].items()}
            missing += [short.get(f"--{name}", f"--{name}") for name in required if name not in names]
    first = next((number for number, option in enumerate(given) if option.name == "data"), None)
    for number, option in enumerate(given):
        if option.name.startswith("data.") and "data" in known and (first is None or number < first):
            if "root" in names:
                return (
                    f"--{option.name} is for --data NAME: --data ImageFolderData --data.root DIR in the place of --root"
                )
            return NO_DATA if first is None else f"--{option.name}: name the data (--data NAME) before its options"
        if complaint := _no_mapping(option, known) or _wrong_name(option, known) or _wrong_value(option, known):
            return complaint
    if needs_data and "data" not in names:
        return NO_DATA
    return f"missing: {', '.join(missing)}" if missing else _one_line(error)


def option_types(parser: ArgumentParser) -> dict[str, Any]:
    """Return the options of a parser and its commands by name, each with its type; None: it has no type hint."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                found |= option_types(command)
        names = (string.lstrip("-") for string in action.option_strings)
        found |= dict.fromkeys(names, getattr(action, "_typehint", action.type))
    return found


def _given(arguments: Sequence[str], known: Mapping[str, Any]) -> Iterator[Given]:
    for argument in arguments:
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in ("config", "c"):
            if not value:
                raise UsageError("--config needs a value")
            yield from _in_file(_options_of(value), value, known)
        elif value.startswith("{") and isinstance(options := _json(value), dict):
            yield from _in_file({name.removesuffix("+"): options}, None, known)
        elif argument.startswith("-"):
            yield Given(name.removesuffix("+"), value if equals else None)


def _json(value: str) -> Any:
    try:
        return load_config(value)
    except (yaml.YAMLError, RecursionError):
        return None


def _options_of(config: str) -> dict[str, Any]:
    """Load a configuration: the path of a file, or YAML in one line."""
    try:
        options = load_config(config if config.startswith("{") else Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        near = {file.name: str(file) for file in Path(config).parent.glob("*.y*ml")}
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = did_you_mean(Path(config).name, near) or did_you_mean(Path(config).stem, shipped_configs())
        raise UsageError(f"--config {config}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {config}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"--config {config}: {error.problem} (line {error.problem_mark.line + 1})") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"--config {config}: {_one_line(error)}") from error
    if not isinstance(options, dict):
        raise UsageError(
            f"--config {config}: options go by name, such as 'trainer: {{max_epochs: 10}}', got {_one_line(options)}"
        )
    return options


def _in_file(
    options: Mapping[str, Any], file: str | None, known: Mapping[str, Any], prefix: str = ""
) -> Iterator[Given]:
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            for item in value:
                yield from _in_file({key: item}, file, known, prefix)
        elif isinstance(value, dict) and "class_path" in value:
            yield Given(name, value["class_path"], file)
            inner = value.get("init_args") or {}
            if not isinstance(inner, dict):
                place = "" if file is None else f" in {file}"
                raise UsageError(f"{name}.init_args{place} must be name: value pairs, got {_one_line(inner)}")
            yield from _in_file(inner, file, known, f"{name}.")
        elif isinstance(value, dict) and known.get(name) is None:
            yield from _in_file(value, file, known, f"{name}.")
        else:
            yield Given(name, value, file)


def _families(hint: Any) -> list[type]:
    """Return the classes of which an option takes subclasses."""
    parts = [hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))]
    # `Any` is a class from Python 3.11 on.
    classes = (part for part in parts if inspect.isclass(part) and part is not Any and not get_args(part))
    return [part for part in classes if part.__module__ != "builtins"]


def _subclasses(hint: Any) -> dict[str, type]:
    classes = _families(hint)
    # It grows as it is gone through.
    for cls in classes:
        classes += cls.__subclasses__()
    return {cls.__name__: cls for cls in classes}


def _class_named(hint: Any, value: Any) -> type | None:
    return _subclasses(hint).get(value.rpartition(".")[2]) if isinstance(value, str) else None


def _wrong_name(option: Given, known: Mapping[str, Any]) -> str | None:
    if option.name in known:
        return None
    owners = [name for name in known if option.name.startswith(f"{name}.") and known[name] is not None]
    if any(not any(name.startswith(f"{owner}.") for name in known) for owner in owners):
        # Inside a dictionary, or a class that only the parser finds.
        return None
    dashes, place = ("--", "") if option.file is None else ("", f" in {option.file}")
    shown = f"unknown option {dashes}{option.name}"
    if option.name.startswith("data.") and "data" in known:
        name = option.name.removeprefix("data.")
        if owners := sorted(cls.__name__ for cls in data_modules() if name in cls.argument_names()):
            have = f"{listing(owners)} {'has' if len(owners) == 1 else 'have'} it"
            return f"{shown}{place}: {have}; name the data (--data NAME) before its options"
    argument = option.name.removeprefix("model.")
    if option.name.startswith("model.") and any(argument in model_arguments(name) for name in FAMILIES):
        return f"{shown}{place}: arguments of the model itself are {dashes}model.model_kwargs.{argument}"
    names = {f"{dashes}{name}": name for name in known}
    if option.file is None:
        short = {short: own.lstrip("-") for table in ALIASES.values() for short, own in table.items()}
        # Those of the data are known also where nothing has named the kind of data yet.
        of_data = "data." if "data" in known else "-"
        names |= {short: own for short, own in short.items() if own in known or own.startswith(of_data)}
    last = SYNONYMS.get(option.name.rpartition(".")[2])
    if same := [name for name, own in names.items() if own.rpartition(".")[2] == last]:
        return f"{shown}{place} (did you mean {min(same, key=len)!r}?)"
    return f"{shown}{place}{did_you_mean(shown.split()[-1], names)}"


def _no_mapping(option: Given, known: Mapping[str, Any]) -> str | None:
    parent, place = option.name.rpartition(".")[0], "" if option.file is None else f" in {option.file}"
    hint = known.get(parent)
    if hint is None or _families(hint) or _accepts(hint, {}):
        return None
    return f"--{parent}{place} must be {_in_words(hint)}, got a mapping"


def _wrong_value(option: Given, known: Mapping[str, Any]) -> str | None:
    name, value, file = option
    hint, place = known.get(name), "" if file is None else f" in {file}"
    if hint is None:
        if file is None or isinstance(value, dict) or not any(other.startswith(f"{name}.") for other in known):
            return None
        example = f"'{name}: {{NAME: VALUE}}'"
        return f"{name}{place} must hold its options by name, such as {example}, got {_one_line(value)}"
    if value is None and file is None:
        return f"--{name} needs a value"
    families = _families(hint)
    if _class_named(hint, value) is not None or (families and not isinstance(value, str)) or _accepts(hint, value):
        return None
    if families and "." not in value:
        # Of relvit's own classes users choose data alone.
        others = [other for other, cls in _subclasses(hint).items() if not cls.__module__.startswith("relvit.")]
        names = sorted([cls.__name__ for cls in data_modules()] if name == "data" else others)
        return f"unknown {name} {value!r}{place}{did_you_mean(value, names)}; known: {listing(names)}"
    if families:
        module, _, cls = value.rpartition(".")
        try:
            # The parser has tried the same import.
            getattr(importlib.import_module(module), cls)
        except Exception as reason:
            return f"--{name}{place}: {value}: {_one_line(reason)}"
    nearest = did_you_mean(value, _choices(hint)) if isinstance(value, str) else ""
    return f"--{name}{place} must be {_in_words(hint)}, got {_one_line(value)}{nearest}"


def _accepts(hint: Any, value: Any) -> bool:
    probe = ArgumentParser(exit_on_error=False, parser_mode=MODE)
    probe.add_argument("--value", type=hint)
    try:
        probe.parse_object({"value": value})
    except (ArgumentError, OverflowError):  # jsonargparse converts an integer, however large, to a float
        return False
    return True


def _choices(hint: Any) -> list[str]:
    """The strings that a type allows by name."""
    if get_origin(hint) is Literal:
        return [part for part in get_args(hint) if isinstance(part, str)]
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _in_words(hint: Any) -> str:
    """Name a type as users know it."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _in_words(parts[0])
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(part) for part in parts if part is not type(None)))
    if kind is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if kind is list and parts:
        return f"a list, of which each item is {_in_words(parts[0])}"
    return WORDS.get(kind, kind.__name__)


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 500 else f"{text[:497]}..."
