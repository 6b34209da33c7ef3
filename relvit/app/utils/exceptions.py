"""Exceptions of the application, for example if a package is not installed, and attributes that may raise errors."""

from typing import Any

# `EXTRAS` maps each optional package to the extra of relvit that installs it.
EXTRAS = {
    **dict.fromkeys(("lightning", "torchmetrics", "jsonargparse", "matplotlib", "sklearn"), "train"),
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pyarrow": "parquet",
    "datasets": "hfds",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "pytorch_grad_cam": "show",
    "gradio": "demo",
    "lightly": "lightly",
}


class LostProcessError(RuntimeError):
    """Another process of a run has ended, without which this one cannot go on."""


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message says how to install the package.

    Args:
        purpose: what needs the package.
        package: the name of the package or of one of its modules.
    """

    def __init__(self, purpose: str, package: str | None) -> None:
        name = (package or "").partition(".")[0]
        install = f'"relvit[{EXTRAS[name]}]"' if name in EXTRAS else name
        super().__init__(f"{purpose} needs the package {name}: pip install {install}", name=name)


def attribute_of(given: Any, name: str) -> Any:
    """Return an attribute of a user's object, or None if the object does not have it.

    The attribute may be a property whose code has an error. If that error is an AttributeError, `getattr` with a
    default would return the default, and the user's attribute would silently have no effect.

    Raises:
        AttributeError: The code of the attribute raises this error for an attribute of another name.
    """
    try:
        return getattr(given, name)
    except AttributeError as error:
        # An object that passes attributes on to another one raises the error of that one, or an error without a name.
        if error.name not in (name, None):
            raise
        return None
