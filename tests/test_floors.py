"""Imports inside relvit only point down, in the order that CONTRIBUTING.md gives, and folders stay small."""

import ast
from pathlib import Path

import relvit

ROOT = Path(relvit.__file__).parent
# Every folder may import from these folders and from itself.
BELOW = {
    "utils": (),
    "ops": ("utils",),
    "layers": ("utils", "ops"),
    "models": ("utils", "ops", "layers"),
    "families": ("utils", "ops", "layers", "models"),
    "plots": ("utils",),
    "data": ("utils", "plots"),
    "training": ("utils", "ops", "layers", "models", "families", "plots", "data"),
    "evaluation": ("utils", "ops", "layers", "models", "families", "plots", "data", "training"),
    "cli": ("utils", "ops", "layers", "models", "families", "plots", "data", "training", "evaluation"),
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_down():
    checked = 0
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parts[0]
        if folder not in BELOW:
            continue
        for module in imported_modules(path):
            package, *names = module.split(".")
            if package == "relvit" and names and names[0] != "version":
                assert names[0] in (folder, *BELOW[folder]), f"{path} imports {module}"
                checked += 1
            if folder in ("ops", "layers", "models", "families"):
                assert package not in ("lightning", "matplotlib", "torchmetrics"), f"{path} imports {module}"
            if folder == "ops":
                assert package != "timm", f"{path} imports {module}"
    assert checked > 300


def test_the_root_holds_the_package_alone():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "version.py"}


def test_folders_stay_small():
    tests = Path(__file__).parent
    tops = (ROOT, tests, tests.parent / "tools")
    for folder in (path for top in tops for path in (top, *top.rglob("*")) if path.is_dir()):
        assert len(list(folder.glob("*.py"))) <= 12, folder


def test_fast_backends_never_import_the_reference():
    choosing = ("attention", "operations", "api")
    paths = [path for path in (ROOT / "ops").rglob("*.py") if path.parent.stem != "reference"]
    for path in paths:
        if path.stem not in choosing:
            assert not any("reference" in module for module in imported_modules(path)), path
