"""Secrets in the arguments of loggers and callbacks: recorded as `***`, and left out again where a record is read."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from relvit.app.cli.errors import UsageError
from relvit.utils.messages import without_secrets

MASK = "***"
SECRET = {*("key", "apikey", "token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "pwd")}
SECRET |= {*("credential", "credentials", "auth", "authorization", "headers")}
# These arguments of the trainer are classes with arguments of their own.
CLASSES = ("logger", "callbacks")


def mask_secrets(logger: Any) -> Any:
    """Return the configuration of a logger or callback, or a list of several, in which the secrets are `***`.

    An argument is a secret if a whole word of its name is one of `SECRET`, such as `api_key`. Of addresses the user,
    the password and the query are left out.
    """
    if isinstance(logger, Mapping | Namespace):
        fields = _fields(logger)
        return type(logger)(
            {name: MASK if _is_secret(name, fields[name]) else mask_secrets(fields[name]) for name in fields}
        )
    return [mask_secrets(item) for item in logger] if isinstance(logger, list | tuple) else without_secrets(logger)


def mask_command(command: Sequence[str], *classes: Any) -> list[str]:
    """Return a command line in which the secrets of loggers and callbacks are `***`, in any place of it."""
    command = [without_secrets(argument) for argument in command]
    secrets = {*_texts(classes)} - {*_texts(mask_secrets(classes))}
    # JSON may write a secret in other characters. The longest form comes first, because it may contain another one.
    forms = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
    pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")
    return [pattern.sub(MASK, argument) for argument in command]


def without_masks(logger: Any, kind: str = "logger") -> Any:
    """Return the configuration of a logger or callback without the secrets that are `***`, which it finds elsewhere.

    A logger takes them from the environment. `kind` is the argument of the trainer.

    Raises:
        UsageError: the logger needs one of them as an argument.
    """
    if isinstance(logger, list | tuple):
        return [without_masks(item, kind) for item in logger]
    if not isinstance(logger, Mapping | Namespace):
        return logger
    fields = _fields(logger)
    if fields.get("init_args"):
        _check_given(fields["class_path"], _fields(fields["init_args"]), kind)
    return type(logger)({name: without_masks(value, kind) for name, value in fields.items() if value != MASK})


def _check_given(path: str, arguments: Mapping[str, Any], kind: str) -> None:
    """Refuse a logger or callback whose arguments without a default are `***`."""
    module, _, cls = path.rpartition(".")
    for name, parameter in inspect.signature(getattr(importlib.import_module(module), cls)).parameters.items():
        if arguments.get(name) == MASK and parameter.default is parameter.empty:
            option = f"--trainer.{kind}.init_args.{name}"
            raise UsageError(f"{cls} needs its {name}, which the configuration does not record: give {option}")


def _fields(value: Mapping[str, Any] | Namespace) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else vars(value)


def _is_secret(name: str, value: Any) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(name))
    return value is not None and not SECRET.isdisjoint(word.lower() for word in words)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts and numbers in a value."""
    if isinstance(value, Mapping | Namespace):
        value = list(_fields(value).values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif not isinstance(value, bool) and value not in (None, ""):
        yield str(value)
