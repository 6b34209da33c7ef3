"""The data modules that there are, by name."""

import inspect

from relvit.data.base import ImageData


def data_modules() -> list[type[ImageData]]:
    """The data modules that can be chosen by name: all that have been imported."""
    found, families = [], [ImageData]
    while families:
        subclasses = families.pop().__subclasses__()
        families += subclasses
        found += [cls for cls in subclasses if cls.chosen_by_name and not inspect.isabstract(cls)]
    return found


def own_data_module(class_path: str) -> type[ImageData] | None:
    """The data module of relvit with that full name, as a checkpoint stores it; None for any other.

    Nothing is imported for it: a file must not choose what runs.
    """
    return next(
        (
            cls
            for cls in data_modules()
            if cls.__module__.startswith("relvit.data.")
            and class_path in (f"{cls.__module__}.{cls.__qualname__}", f"relvit.data.{cls.__qualname__}")
        ),
        None,
    )
