"""Registry of data modules: find the class for a name given to `--data`, in a configuration or in a checkpoint."""

import importlib
import inspect

import relvit.app.data
from relvit.app.data.modules.base import ImageData
from relvit.utils.messages import did_you_mean, listing


def data_modules() -> list[type[ImageData]]:
    """List the data modules that can be chosen by name: all that have been imported, also a user's."""
    found, families = [], [ImageData]
    while families:
        subclasses = families.pop().__subclasses__()
        families += subclasses
        chosen = [cls for cls in subclasses if cls.chosen_by_name or not cls.__module__.startswith("relvit.")]
        found += [cls for cls in chosen if not inspect.isabstract(cls)]
    return found


def imported_data_module(class_path: str) -> type[ImageData] | None:
    """Return the data module that a checkpoint names if relvit or the user has already imported it, otherwise None.

    This function imports nothing, because a checkpoint must not choose which code runs.
    """
    named = (cls for cls in data_modules() if class_path_of(cls) == class_path)
    return next(named, None)


def import_data_module(name: str) -> type[ImageData] | None:
    """Return the data module that a user names: `ImageFolderData`, `relvit.app.data.ImageFolderData`, `my_module.Mine`.

    Return None if the name is no data module; the parser of the command line then refuses the name and says why.
    """
    module, _, last = name.rpartition(".")
    if module and not module.startswith("relvit."):
        try:
            importlib.import_module(module)
        except ImportError:
            return None
        return imported_data_module(name)
    return next((cls for cls in data_modules() if cls.__name__ == last), None)


def named_data_module(name: str | None) -> type[ImageData] | None:
    """Return the data module that a user names, see `import_data_module`; None if no name is given.

    Raises:
        ValueError: There is no such data module.
    """
    found = None if name is None else import_data_module(name)
    if name is not None and found is None:
        known = [cls.__name__ for cls in data_modules()]
        raise ValueError(
            f"no data module {name!r}{did_you_mean(name, known)}: give one of {listing(known)}, or MODULE.CLASS"
        )
    return found


def class_path_of(cls: type[ImageData]) -> str:
    """Return the name by which configurations know a data module; relvit's own without the module it is in."""
    public = getattr(relvit.app.data, cls.__name__, None) is cls
    return f"{relvit.app.data.__name__ if public else cls.__module__}.{cls.__qualname__}"
