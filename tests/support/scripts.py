"""Import the scripts of the folder tools as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import `name`.py from a folder in tools; the script can import the modules beside it, as when Python runs it."""
    (path,) = (ROOT / "tools").rglob(f"{name}.py")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(name)
