"""Registry of data modules: find the class for a name given to `--data`, in a configuration or in a checkpoint."""

import inspect
import re

from relvit.data.modules.base import ImageData


def data_modules() -> list[type[ImageData]]:
    """List the data modules that can be chosen by name: all that have been imported."""
    found, families = [], [ImageData]
    while families:
        subclasses = families.pop().__subclasses__()
        families += subclasses
        found += [cls for cls in subclasses if cls.chosen_by_name and not inspect.isabstract(cls)]
    return found


def public_class_path(text: str) -> str:
    """Replace full names of relvit's classes of data, wherever their modules are or were, by `relvit.data.NAME`.

    Parts of longer names and of paths stay as they are.
    """
    return re.sub(r"(?<![\w./-])relvit\.data(?:\.[a-z_]+)+\.([A-Z]\w*)(?![\w./-])", r"relvit.data.\1", text)


def own_data_module(class_path: str) -> type[ImageData] | None:
    """Return the data module of relvit that a checkpoint names; None for any other.

    Nothing is imported for it: a file must not choose what runs.
    """
    own = (cls for cls in data_modules() if cls.__module__.startswith("relvit.data."))
    return next((cls for cls in own if public_class_path(class_path) == f"relvit.data.{cls.__name__}"), None)
