"""Decide by names which arguments are secrets, such as passwords, and mask them, nested ones too, as `***`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jsonargparse import Namespace

from relvit.app.utils.shown_text import without_secrets

MASK = "***"
SECRET = {*("key", "apikey", "token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "pwd")}
SECRET |= {*("credential", "credentials", "auth", "authorization", "headers", "cookie", "cookies", "bearer", "jwt")}
SECRET |= {*("passphrase", "passcode", "pass", "dsn", "webhook", "signature", "accesskey", "secretkey", "authtoken")}
SECRET |= {*("accesstoken", "oauth", "sas")}


def mask_secrets(arguments: Any, public: Collection[str] = ()) -> Any:
    """Return arguments, or the configuration of one or several classes, in which the secrets are `***`.

    An argument is a secret if `SECRET` contains a whole word of its name, as for `api_key`, and the name is not in
    `public`. Such an argument is not replaced if it is None, bool or empty. In all other texts, addresses lose their
    user, password and query.
    """
    if isinstance(arguments, Mapping | Namespace):
        fields = fields_of(arguments)
        return type(arguments)(
            {
                name: MASK if name not in public and _is_secret(name, value) else mask_secrets(value, public)
                for name, value in fields.items()
            }
        )
    if isinstance(arguments, list | tuple):
        return [mask_secrets(item, public) for item in arguments]
    return without_secrets(arguments)


def masked(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments that are `***`, or that hold `***` somewhere in them."""
    return [name for name, value in arguments.items() if _holds_mask(value)]


def fields_of(value: Mapping[str, Any] | Namespace) -> Mapping[str, Any]:
    """Return the names and the values of a mapping or namespace."""
    return value if isinstance(value, Mapping) else vars(value)


def _holds_mask(value: Any) -> bool:
    if isinstance(value, Mapping | Namespace):
        value = list(fields_of(value).values())
    return any(map(_holds_mask, value)) if isinstance(value, list | tuple) else value == MASK


def _is_secret(name: str, value: Any) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", str(name))
    empty = isinstance(value, bool) or value in (None, "", {}, [])
    return not empty and not SECRET.isdisjoint(word.lower() for word in words)
