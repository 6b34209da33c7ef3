"""Scripts of the tools folder as modules."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load(name):
    """Import `name`.py below tools once; dataclasses and pickle look modules up in `sys.modules`."""
    if name in sys.modules:
        return sys.modules[name]
    (path,) = (ROOT / "tools").rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
