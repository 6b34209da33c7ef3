"""Training, evaluation, plots, deployment and the command line, which `pip install "relvit[train]"` brings."""

from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from relvit.app.utils.exceptions import MissingPackageError

# `OLDEST` maps each package to its oldest version that pyproject.toml allows.
OLDEST = {"lightning": "2.6.6", "torchmetrics": "1.4", "jsonargparse": "4.51", "matplotlib": "3.8", "sklearn": "1.4"}

# A training locks its folder by `fcntl`. Python for Windows lacks this module, and other modules that `relvit.app`
# needs.
if find_spec("fcntl") is None:
    raise ImportError(
        "relvit.app (training, evaluation and the command line) needs Linux or macOS: on Windows use the Windows "
        "Subsystem for Linux (WSL)"
    )

for _package, _oldest in OLDEST.items():
    if find_spec(_package) is None:
        raise MissingPackageError("relvit.app (training, evaluation and the command line)", _package)
    # `version` needs the project's name, which differs from the package's name only for sklearn.
    _project = "scikit-learn" if _package == "sklearn" else _package
    if Version(version(_project)).release < Version(_oldest).release:
        _needed = f"{_project}>={_oldest}"
        raise ImportError(
            f'relvit.app needs {_needed}, got {_project} {version(_project)}: pip install --upgrade "{_needed}"'
        )
