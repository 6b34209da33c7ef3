"""Public names of earlier releases and where they are now: imports from the old place work for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Old package -> name -> new package.
MOVED: dict[str, dict[str, str]] = {
    "relvit.layers": {"TransformerXLPosition2d": "relvit.families.transformer_xl"},
}


def moved(package: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package from which public names have moved."""

    def find(name: str) -> Any:
        if name not in MOVED[package]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = MOVED[package][name]
        warnings.warn(f"{package}.{name} is now {place}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(place), name)

    return find
