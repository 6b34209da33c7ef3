"""Explain in one line why a parser refuses a command line: the wrong option or value, and the nearest right name.

`relvit.utils.messages.nearest` finds the option whose name is most similar to a misspelt name. `typed_words.SYNONYMS`
has the names that other libraries use for relvit's options.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, Literal, NamedTuple

import timm
from jsonargparse import Namespace

from relvit.app.cli.config_text import load_config, read_config
from relvit.app.cli.errors import UsageError
from relvit.app.cli.option_types import accepts, choices, in_words, item_type, subclasses, takes_one
from relvit.app.cli.typed_words import (
    EMPTY_WORDS,
    INSTEAD,
    LOGGERS,
    OF_FIT,
    OF_TRAINER,
    ONLY_IN_TRAINING,
    PRECISIONS,
    SYNONYMS,
)
from relvit.app.data import ImageData
from relvit.app.data.images.folders import LIST_ENDINGS
from relvit.app.data.registry import NO_DATA_MODULE, data_modules, file_note
from relvit.app.models import model_arguments
from relvit.app.training.checkpoints.checkpoint import OF_THE_DATA
from relvit.app.utils.shown_text import cut
from relvit.utils.messages import did_you_mean, listing, nearest

NO_DATA = "no data given: give --root DIR, which holds train/CLASS/IMAGE, or --data NAME, or --config FILE"
# This message is for `--root` with a `--config` that names no data module, such as `--config reversible`. Most
# configurations name a data module, so `--root` means class folders only if there is no `--config`.
NO_KIND = "no kind of data is named: for class folders in --root add --data ImageFolderData, or a --config with data"
# `fit` has no options for these arguments of the model, because it takes them from the data. Of the arguments in
# `OF_THE_DATA`, `img_size` and `class_names` are options of the data.
DECIDED = {*OF_THE_DATA} - {"img_size", "class_names"}
_BY_DATA = "the data decide it, so leave it out"


def decided_by_data(name: str) -> str:
    """Say what to do instead of giving an argument of the model that the data determine."""
    return _BY_DATA if name in DECIDED else f"the data decide it: give data.{name}"


class Given(NamedTuple):
    """An option such as 'model.lr' that was given, its value, and the configuration that holds it, if one does."""

    name: str
    value: Any
    file: str | None = None

    @property
    def place(self) -> str:
        """Say in which file the option stands."""
        return "" if self.file is None else f" in {self.file}"


def explain(parser: ArgumentParser, words: Sequence[str], namespace: Namespace | None, error: Exception) -> str:
    """Find the first option that the parser does not know, or whose value has the wrong type.

    If there is no such option, say which needed options are missing. If none is missing, return the parser's own
    message, which reports all types that the parser has tried. `namespace` holds the values that options have before
    the command line is read, such as the values in a checkpoint.

    Raises:
        UsageError: a configuration cannot be read.
    """
    known = option_types(parser)
    at_first = {} if namespace is None else namespace.as_dict()
    given = [*_options_in(at_first, "the checkpoint", known), *_in_words(words, known)]
    # An option that is set to null counts as missing, so leave out its name.
    names = {option.name for option in given if option.value != ("null" if option.file is None else None)}
    short = {own: name for name, own in (OF_TRAINER | OF_FIT).items()}
    missing = []
    own: type[ImageData] | None = None
    for option in given:
        if (cls := _class_named(known.get(option.name), option.value)) is not None:
            probe = type(parser)()
            probe.add_class_arguments(cls, option.name, fail_untyped=False)
            known = option_types(probe) | known
            needed = [f"{option.name}.{name}" for name in required(cls)]
            missing += [f"--{short.get(name, name)}" for name in needed if name not in names]
            if option.name == "data":
                own = cls if cls.is_of_user() else None
    for option in given:
        if option.name.startswith("data.") and "data" in known and "data" not in names:
            instead = "--data ImageFolderData --data.root DIR in the place of --root"
            if "root" in names:
                return f"--{option.name} is for --data NAME: {instead}"
            return NO_KIND if "data.root" in names else NO_DATA
        if complaint := _not_passed_on(option, known, own) or _wrong_name(option, known) or _wrong_value(option, known):
            # Without a hint about the name, the user has to read the help, so say which option shows the help.
            dashes = "--" if option.file is None else ""
            bare = complaint == f"unknown option {dashes}{option.name}{option.place}"
            return f"{complaint}; {parser.prog} --help-all lists the options" if bare else complaint
    # All commands that have options of the Trainer need data, because they run the Trainer on images.
    if "trainer.devices" in known and "data" not in names:
        return NO_DATA
    return f"missing: {', '.join(missing)}" if missing else cut(error)


def required(function: Any) -> list[str]:
    """Return the arguments of a function or class that have no default."""
    parameters = inspect.signature(function).parameters.values()
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [parameter.name for parameter in named if parameter.default is parameter.empty]


def option_types(parser: ArgumentParser) -> dict[str, Any]:
    """Return the options of a parser by name, each with its type; None: it has no type hint."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        # Leave out links, such as 'data.in_chans --> model.in_chans', because users cannot give them as options.
        names = (string.lstrip("-") for string in action.option_strings if "-->" not in string)
        found |= dict.fromkeys(names, getattr(action, "_typehint", action.type))
    return found


def _in_words(words: Sequence[str], known: Mapping[str, Any]) -> Iterator[Given]:
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if name == "config":
            if not value:
                raise UsageError("--config needs a value: give a file, or the name of one of relvit's configurations")
            yield from _options_in(read_config(value), value, known)
        elif value.startswith("{") and accepts(dict, value):
            yield from _options_in({name.removesuffix("+"): load_config(value)}, None, known)
        else:
            yield Given(name.removesuffix("+"), value if equals else None)


def _options_in(
    options: Mapping[str, Any], file: str | None, known: Mapping[str, Any], prefix: str = ""
) -> Iterator[Given]:
    """Yield the options in nested mappings; a class is an option, and each of its arguments is an option, too.

    If an option's value is a class, yield the option with the `class_path` as its value, then each argument in
    `init_args` as a separate option.
    """
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, dict) and "class_path" in item for item in value):
            for item in value:
                yield from _options_in({key: item}, file, known, prefix)
        elif isinstance(value, dict) and "class_path" in value:
            if outside := [each for each in value if each not in ("class_path", "init_args", "dict_kwargs")]:
                place = Given(name, value, file).place
                raise UsageError(
                    f"{name}{place} holds {listing(outside)} beside class_path: put options into init_args"
                )
            yield Given(name, value["class_path"], file)
            inner = value.get("init_args") or {}
            if not isinstance(inner, dict):
                place = Given(name, inner, file).place
                raise UsageError(f"{name}.init_args{place} must be name: value pairs, got {cut(inner)}")
            yield from _options_in(inner, file, known, f"{name}.")
        elif isinstance(value, dict) and known.get(name) is None:
            yield from _options_in(value, file, known, f"{name}.")
        else:
            yield Given(name, value, file)


def _class_named(hint: Any, value: Any) -> type | None:
    """Return the class that a value names; if the value names its module, too, search only in this module.

    If the value names a module, as 'my_module.Mine' does, the class is found only if the module is imported already, so
    that no code of a user runs only to explain a mistake.
    """
    if not isinstance(value, str):
        return None
    module, _, name = value.rpartition(".")
    if not module:
        return subclasses(hint).get(name)
    found = getattr(sys.modules.get(module), name, None)
    return found if any(found is cls for cls in subclasses(hint).values()) else None


@cache
def _arguments_of_models() -> Set[str]:
    return {each for model in timm.list_models("relvit*_small") for each in model_arguments(model)} - {*OF_THE_DATA}


def _not_passed_on(option: Given, known: Mapping[str, Any], own: type[ImageData] | None) -> str | None:
    """Refuse an option of relvit's data modules that the user's class `own` sets itself or does not have."""
    group, _, last = option.name.partition(".")
    if own is None or group != "data" or option.name in known or last not in own.public_names():
        return None
    dashes = "--" if option.file is None else ""
    return (
        f"unknown option {dashes}{option.name}{option.place}: the constructor of {own.__name__} sets it itself, or "
        "does not pass on its **options"
    )


def _wrong_name(option: Given, known: Mapping[str, Any]) -> str | None:
    name, place = option.name, option.place
    if name in known:
        return None
    parent = max((other for other in known if name.startswith(f"{other}.") and known[other]), key=len, default=None)
    if parent is not None and not any(other.startswith(f"{parent}.") for other in known):
        # The name may be right: it may be a key of a dictionary, or an argument of a class that `_class_named` does not
        # find.
        if subclasses(known[parent]) or accepts(known[parent], {}):
            return None
        return f"--{parent}{place} must be {in_words(known[parent])}, got a mapping"
    dashes = "--" if option.file is None else ""
    shown = f"unknown option {dashes}{name}{place}"
    group, _, last = name.partition(".")
    relvits = [cls for cls in data_modules() if not cls.is_of_user()]
    if group == "data" in known and (owners := sorted(cls.__name__ for cls in relvits if last in cls.argument_names())):
        return f"{shown}: {listing(owners)} {'has' if len(owners) == 1 else 'have'} it; name the data by --data NAME"
    of_fit = "resume" in known
    if of_fit and option.file is not None and (long := (OF_TRAINER | OF_FIT).get(name)) is not None:
        return f"{shown}: its name in configurations is {long}"
    # The user may have typed the name that another library has for the argument, so look up its synonyms.
    meant = [last or group, *SYNONYMS.get(last or group, [])]
    if of_fit and group != "data" and name not in INSTEAD and not DECIDED.isdisjoint(meant):
        return f"{shown}: {_BY_DATA}"
    of_models = _arguments_of_models()
    of_model = f"{shown}: arguments of the model itself are {dashes}model.model_kwargs."
    if group == "model" and last in of_models:
        return of_model + last
    # Commands other than `fit` take the model from the checkpoint and do not train, so suggest no options of the model
    # or the training to their users.
    names = {
        f"{dashes}{other}": other
        for other in known
        if of_fit or not (other.startswith("model.") or other in ONLY_IN_TRAINING)
    }
    if option.file is None:
        # `known` has the options of the data only if the user has given --data. So also suggest their short names, such
        # as --root for data.root. Commands without a Trainer do not have these short names; for these commands no
        # option begins with the prefix "-".
        of_data = "data." if "trainer.devices" in known else "-"
        short = OF_TRAINER | (OF_FIT if of_fit else {})
        names |= {f"--{each}": own for each, own in short.items() if own in known or own.startswith(of_data)}
    # The user may have misspelt the option before the last dot, and mean a key of its dictionary, as in
    # `--retrofit.rel_terms`.
    holder, _, key = name.rpartition(".")
    owner = _meant(f"{dashes}{holder}", names) if holder and holder not in known else None
    if owner is not None and known.get(names[owner]) is not None and accepts(known[names[owner]], {}):
        return f"{shown} (did you mean '{owner}.{key}'?)"
    lasts = {part.rpartition(".")[2].lstrip("-") for pair in names.items() for part in pair}
    words = [*INSTEAD, *lasts, *SYNONYMS]
    typed = name if name in INSTEAD else nearest(name.rpartition(".")[2], words, parts=False)
    if of_fit and (instead := INSTEAD.get(typed or "")):
        return f"{shown}: {instead}"
    if of_fit and name in of_models and nearest(name, [*lasts, *SYNONYMS], parts=False) is None:
        return of_model + name
    if (found := _meant(f"{dashes}{name}", names)) is not None:
        return f"{shown} (did you mean {found!r}?)"
    # Suggest arguments of the model only to users of `fit`, because other commands take the model from a checkpoint.
    if of_fit and (found := nearest(name.removeprefix("model."), sorted(of_models), parts=False)) is not None:
        return of_model + found
    return shown


def _meant(typed: str, names: Mapping[str, str]) -> str | None:
    """Return the option that the user likely means, by its name here or by its name in another library.

    Args:
        typed: the option that the user typed, such as '--model.learningrate'.
        names: maps each name of an option that a message may show to the full name of the option.
    """
    group, _, last = typed.rpartition(".")
    last = last.lstrip("-").replace("-", "_")
    if SYNONYMS.get(last) == []:
        return None
    lasts = {name: {part.rpartition(".")[2].lstrip("-") for part in (name, full)} for name, full in names.items()}
    of_command = set().union(*lasts.values())
    others = {other: own for other, owns in SYNONYMS.items() for own in owns[::-1] if own in of_command}
    # Compare the typed name with the options of the command, and with the names that other libraries have for these
    # options. If the typed name is itself a name in another library, leave out all other names of other libraries.
    # Otherwise leave out their names of up to three letters, because many short names are similar.
    names_elsewhere = [other for other in others if last == other or (len(other) > 3 and last not in SYNONYMS)]
    spelt = nearest(last, [*names_elsewhere, *of_command], parts=False) or _of_same_words(last, of_command)
    # An option of the command comes first: `--data.trian` means `--data.train` of lists of images, although `train` is
    # also a name in other libraries, for `--root`.
    own = spelt if spelt in of_command else others.get(spelt or "")
    found = [name for name, parts in lasts.items() if own in parts]
    beside = [name for name in found if name.rpartition(".")[0] == group and own == spelt]
    return min(beside or found, key=len, default=None)


def _of_same_words(typed: str, names: Collection[str]) -> str | None:
    """Return the only name that begins or ends with the typed words, without empty words such as `use`.

    No other words are left out: in `warmup_lr`, for example, `warmup` matters, so `lr` is not returned.
    """
    bare = "_".join(word for word in re.split("[_-]", typed) if word not in EMPTY_WORDS)
    ends = [each for each in names if each.startswith(bare) or each.endswith(bare)]
    found = [each for each in ends if len(bare) >= max(5, 0.6 * len(each))]
    return bare if bare in found else found[0] if len(found) == 1 else None


def _wrong_value(option: Given, known: Mapping[str, Any]) -> str | None:
    name, value, file = option
    hint, place = known.get(name), option.place
    if hint is None:
        if file is None or isinstance(value, dict) or not any(other.startswith(f"{name}.") for other in known):
            return None
        inner = f"{name}: {value}" if f"{name}.{name}" in known else "NAME: VALUE"
        return f"{name}{place} must hold its options by name, such as '{name}: {{{inner}}}', got {cut(value)}"
    if value is None and file is None:
        return f"--{name} needs a value"
    classes = subclasses(hint)
    # Suggest only data modules among relvit's classes: users choose no other classes of relvit on the command line.
    others = [other for other, cls in classes.items() if not cls.__module__.startswith("relvit.")]
    names = sorted([cls.__name__ for cls in data_modules()] if name == "data" else others)
    names = [*LOGGERS, *names] if name == "trainer.logger" else names
    if classes and isinstance(value, dict):
        return f"{name}{place} must have a class_path, and its options in init_args; known are {listing(names)}"
    if _class_named(hint, value) is not None or (classes and not isinstance(value, str)) or accepts(hint, value):
        return None
    if name == "data" and (os.sep in value or value.lower().endswith(LIST_ENDINGS)):
        lists = "a list by --data ImageListData and --data.train, --data.val, --data.test or --data.predict"
        return f"--data{place} must be a kind of data, got {cut(value)}: give class folders by --root DIR, or {lists}"
    if classes and "." not in value:
        return f"unknown {name} {value!r}{place}{did_you_mean(value, names)}; known: {listing(names)}"
    if classes:
        module, _, cls = value.rpartition(".")
        try:
            # Import the class to learn why it cannot be found. The parser has already tried this import, so it runs no
            # code that has not run before.
            getattr(importlib.import_module(module), cls)
        except Exception as reason:
            return f"--{name}{place}: {value}: {cut(reason)}{file_note(module, reason)}"
        if name == "data":
            return f"--{name}{place}: {value} {NO_DATA_MODULE}"
    several = item_type(hint) is not None and not takes_one(hint)
    if several and isinstance(value, str | int | float) and accepts(hint, f"[{value}]"):
        return f"--{name}{place} must be a list in brackets, '[{value}]', got {cut(value)}"
    hinted, allowed, wanted = "", choices(hint), in_words(hint)
    if name == "trainer.precision":
        allowed, wanted = list(PRECISIONS), in_words(Literal[PRECISIONS])
    if several and item_type(hint) is str:
        # YAML reads unquoted items such as 1 and true as a number and a boolean, which the parser refuses where texts
        # are needed.
        hinted = ": put each text in quotes, such as ['1','2']"
    elif isinstance(value, str):
        # If an option has several values, `value` is the text of a list, such as '[a,b]'.
        given = [item.strip() for item in value.strip("[]").split(",")]
        value = ", ".join(given) if several else value
        hinted = did_you_mean(next((item for item in given if item not in allowed), value), allowed)
    # On the command line each value of a dictionary is a separate option.
    inner = f": give --{name}.NAME VALUE" if file is None and accepts(hint, {}) else ""
    return f"--{name}{place} must be {wanted}, got {cut(value)}{hinted}{inner}"
