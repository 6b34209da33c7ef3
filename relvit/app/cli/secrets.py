"""Hide secrets in a recorded command line and configuration; refuse the recorded `***` as a value.

`relvit/app/utils/masks.py` decides which names are secret.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from relvit.app.cli.errors import UsageError
from relvit.app.data.registry import imported_data_module
from relvit.app.utils.masks import MASK, fields_of, masked
from relvit.app.utils.shown_text import without_secrets
from relvit.utils.messages import listing

# These arguments of the Trainer hold classes with arguments, some of which may be secret.
CLASSES = ("logger", "callbacks")


def mask_command(command: Sequence[str], given: Any, recorded: Any) -> list[str]:
    """Return a command line in which `***` replaces each secret, also within a word.

    `recorded` is the configuration `given` with `***` in the place of secrets, so a text of `given` that `recorded`
    lacks is a secret.
    """
    command = [without_secrets(argument) for argument in command]
    secrets = {*_texts(given)} - {*_texts(recorded)}
    # A secret may also stand in the command as JSON, with escaped characters, so look for both forms. Longer forms come
    # first, because a longer form may contain a shorter one.
    forms = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
    pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")
    return [pattern.sub(MASK, argument) for argument in command]


def without_masks(logger: Any, kind: str = "logger") -> Any:
    """Return the configuration of a logger or callback without secrets that are `***`.

    A logger then reads these secrets from the environment. `kind` is the Trainer's argument that holds the
    configuration: 'logger' or 'callbacks'.

    Raises:
        UsageError: one of these secrets is an argument without a default.
    """
    if isinstance(logger, list | tuple):
        return [without_masks(item, kind) for item in logger]
    if not isinstance(logger, Mapping | Namespace):
        return logger
    fields = fields_of(logger)
    if fields.get("init_args"):
        _check_given(fields["class_path"], fields_of(fields["init_args"]), kind)
    return type(logger)({name: without_masks(value, kind) for name, value in fields.items() if value != MASK})


def without_data_masks(data: Any) -> Any:
    """Return the configuration of a data module without secrets that are `***` and have a default.

    Raises:
        UsageError: a secret without a default has to be given again.
    """
    arguments = fields_of(data.get("init_args") or {}) if isinstance(data, Namespace) else {}
    if not masked(arguments):
        return data
    data_type = imported_data_module(data.class_path)
    defaults = {} if data_type is None else data_type.argument_defaults()
    required = inspect.Parameter.empty
    kept = {
        name: value for name, value in arguments.items() if value != MASK or defaults.get(name, required) is required
    }
    if names := masked(kept):
        cls = data.class_path.rpartition(".")[2]
        options = " ".join(f"--data.{name}" for name in names)
        raise UsageError(f"{cls} had {listing(names)}, which no file of the training records: give {options} again")
    return Namespace(class_path=data.class_path, init_args=Namespace(kept))


def _check_given(path: str, arguments: Mapping[str, Any], kind: str) -> None:
    """Refuse a logger or callback whose arguments without a default are `***`."""
    module, _, cls = path.rpartition(".")
    for name, parameter in inspect.signature(getattr(importlib.import_module(module), cls)).parameters.items():
        if arguments.get(name) == MASK and parameter.default is parameter.empty:
            option = f"--trainer.{kind}.init_args.{name}"
            raise UsageError(f"{cls} needs its {name}, which the configuration does not record: give {option}")


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts and numbers in a value."""
    if isinstance(value, Mapping | Namespace):
        value = list(fields_of(value).values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif not isinstance(value, bool) and value not in (None, ""):
        yield str(value)
