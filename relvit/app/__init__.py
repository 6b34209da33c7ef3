"""Training, evaluation, plots, deployment and the command line, which `pip install "relvit[train]"` brings."""

from importlib.util import find_spec

from relvit.app.utils.exceptions import MissingPackageError

for _package in ("lightning", "torchmetrics", "jsonargparse", "matplotlib", "sklearn"):
    if find_spec(_package) is None:
        raise MissingPackageError("relvit.app (training, evaluation and the command line)", _package)
