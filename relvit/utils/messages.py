"""Parts of error messages: the nearest allowed name, short lists of names, how to install a missing package."""

import difflib
from collections.abc import Iterable, Sequence

# Optional package -> the extra of relvit that installs the package.
EXTRAS = {
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pyarrow": "parquet",
    "datasets": "hfds",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "pytorch_grad_cam": "show",
    "gradio": "demo",
}


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.4) -> str | None:
    """Return the allowed name nearest to ``name``; None if no similarity reaches ``cutoff``, in 0..1."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the allowed name nearest to ``name``, or '' if none is near."""
    found = nearest(name, allowed)
    return "" if found is None else f" (did you mean {found!r}?)"


def printable(name: str) -> str:
    r"""Return a file name as valid UTF-8: bytes that are not UTF-8 become ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def listing(names: Sequence[str], most: int = 10) -> str:
    """Join quoted names by commas; of many names the first ``most``, and how many more there are."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, or the name of the error's class where there is no message."""
    return " ".join(str(error).split()) or type(error).__name__


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message says how to install the package.

    Args:
        purpose: what needs the package.
        package: the package's name, or that of one of its modules.
    """

    def __init__(self, purpose: str, package: str | None) -> None:
        name = (package or "").partition(".")[0]
        install = f'"relvit[{EXTRAS[name]}]"' if name in EXTRAS else name
        super().__init__(f"{purpose} needs the package {name}: pip install {install}", name=name)


def check_choice(argument: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of the allowed names.

    Raises:
        ValueError: `value` is not in `allowed`; the message has the nearest name.
    """
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ValueError(f"{argument} is {value!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
