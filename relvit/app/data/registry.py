"""Registry of data modules: find the class for a name given to `--data`, in a configuration or in a checkpoint."""

import importlib
import inspect
import sys

import relvit.app.data
from relvit.app.data.modules.base import ImageData
from relvit.app.utils.shown_text import one_line
from relvit.utils.messages import did_you_mean, listing

# Messages say this of an object in a user's module, such as a dataset.
NO_DATA_MODULE = (
    "must be a subclass of relvit.app.data.DatasetData, whose constructor makes the datasets, or of ImageData with all "
    "abstract methods defined"
)


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

    This function imports nothing, because a checkpoint must not choose which code runs. If a notebook has defined the
    class several times, the last definition is returned.
    """
    named = [cls for cls in data_modules() if class_path_of(cls) == class_path]
    return named[-1] if named else None


def import_data_module(name: str) -> type[ImageData] | None:
    """Return the data module that a user names: `ImageFolderData`, `relvit.app.data.ImageFolderData`, `my_module.Mine`.

    Return None if the name is not a data module; the parser of the command line then refuses the name and says why.
    """
    found = _find(name)
    return None if isinstance(found, str) else found


def named_data_module(name: str | None) -> type[ImageData] | None:
    """Return the data module that a user names, see `import_data_module`; None if no name is given.

    Raises:
        ValueError: There is no such data module.
    """
    found = None if name is None else _find(name)
    if isinstance(found, str):
        raise ValueError(f"no data module {name!r}{found}")
    return found


def _find(name: str) -> type[ImageData] | str:
    """Return the data module that a user names; otherwise the end of a message that says why there is none."""
    module, _, last = name.rpartition(".")
    if not module or module.startswith("relvit."):
        known = [cls.__name__ for cls in data_modules()]
        hint = f"{did_you_mean(name, known)}: give one of {listing(known)}, or MODULE.CLASS"
        return next((cls for cls in data_modules() if cls.__name__ == last), hint)
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return f": module {module!r} cannot be imported ({one_line(error)}){file_note(module, error)}"
    if (found := imported_data_module(name)) is not None:
        return found
    if not hasattr(loaded, last):
        return f": module {module!r} has no {last!r}{did_you_mean(last, vars(loaded))}{file_note(module)}"
    value = getattr(loaded, last)
    if isinstance(value, type) and value in data_modules():
        return f": give {class_path_of(value)}, the module that defines it"
    return f": it {NO_DATA_MODULE}"


def file_note(module: str, error: Exception | None = None) -> str:
    """Name the file of an imported module: an installed module comes before a user's file of the same name.

    If `error` says that there is no such module, say instead where modules are found.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
        return "; run the command in the folder that holds it, or install it"
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"; that module is {file}" if file else ""


def class_path_of(cls: type[ImageData]) -> str:
    """Return the name by which configurations know a data module; for relvit's own classes without their module."""
    public = getattr(relvit.app.data, cls.__name__, None) is cls
    return f"{relvit.app.data.__name__ if public else cls.__module__}.{cls.__qualname__}"
