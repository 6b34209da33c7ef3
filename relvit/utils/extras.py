"""Packages that only some uses need: one message for all that are missing."""

from __future__ import annotations

# Package -> the extra of relvit that brings it.
EXTRAS = {
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pyarrow": "parquet",
    "datasets": "hfds",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed; the message says how to.

    Args:
        purpose: what needs it.
        package: its name, or that of a module of it.
    """

    def __init__(self, purpose: str, package: str | None) -> None:
        name = (package or "").partition(".")[0]
        install = f'"relvit[{EXTRAS[name]}]"' if name in EXTRAS else name
        super().__init__(f"{purpose} needs the package {name}: pip install {install}", name=name)
