"""The version of relvit, which CITATION.cff and CHANGELOG.md repeat, and the oldest PyTorch and timm that it takes."""

import importlib

__version__ = "0.2.0"
# pyproject.toml requires the same versions. The versions are repeated here, because a checkout that is found through
# PYTHONPATH is not installed, and so has no metadata to read them from.
OLDEST = {"torch": "2.8", "timm": "1.0.26"}


def check_versions() -> None:
    """Raise an ImportError that says what to install if PyTorch or timm is too old."""
    # Import here and not above, because `relvit --version` must run this file even if no package is installed.
    from packaging.version import Version

    found = {name: str(importlib.import_module(name).__version__) for name in OLDEST}
    # Compare `release`, which is the numbers alone, so that a build before a release, such as 2.8.0a0+nv25.06, is
    # accepted.
    old = [name for name, oldest in OLDEST.items() if Version(found[name]).release < Version(oldest).release]
    if old:
        needed = [f"{name}>={OLDEST[name]}" for name in old]
        raise ImportError(
            f"relvit needs {' and '.join(needed)}, got {' and '.join(f'{name} {found[name]}' for name in old)}: "
            "pip install --upgrade " + " ".join(f'"{package}"' for package in needed)
        )
