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


def run(path: str, *arguments: str) -> None:
    """Run a script in this process, which may already have imported what the script imports, and exit."""
    sys.argv = [path, *arguments]
    sys.exit(load(Path(path).stem).main(arguments))
