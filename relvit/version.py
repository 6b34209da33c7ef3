"""The one place where the version of relvit is written, and the oldest versions of PyTorch and timm that it takes."""

import importlib

__version__ = "0.2.0"
# pyproject.toml says the same, but a checkout in PYTHONPATH has no metadata that could be read here.
OLDEST = {"torch": "2.8", "timm": "1.0.26"}


def check_versions() -> None:
    """Raise an ImportError that says what to install if PyTorch or timm is too old."""
    # `relvit --version` reads this file without the packages.
    from packaging.version import Version

    found = {name: str(importlib.import_module(name).__version__) for name in OLDEST}
    # The numbers alone are compared: a build before a release, such as 2.8.0a0+nv25.06, is taken.
    old = [name for name, oldest in OLDEST.items() if Version(found[name]).release < Version(oldest).release]
    if old:
        needed = [f"{name}>={OLDEST[name]}" for name in old]
        raise ImportError(
            f"relvit needs {' and '.join(needed)}, got {' and '.join(f'{name} {found[name]}' for name in old)}: "
            "pip install --upgrade " + " ".join(f'"{package}"' for package in needed)
        )
