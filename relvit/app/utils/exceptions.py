"""Exceptions of the application: a package that is not installed, a process that has ended."""

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
