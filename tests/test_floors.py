"""Imports inside relvit only point down: ops below layers below models below data, training, evaluation and plots."""

import ast
from pathlib import Path

import relvit

FLOORS = {
    "ops": 1,
    "layers": 2,
    "models": 3,
    "data": 4,
    "training": 4,
    "evaluation": 4,
    "plots": 4,
    "cli": 5,
    "__main__": 5,
}
# These belong to no floor: everybody may use them, and they use nobody above.
GROUND = {"available", "extras", "names", "output", "progress", "remote", "replacing", "seeding", "version"}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_down():
    root = Path(relvit.__file__).parent
    checked = 0
    for path in root.rglob("*.py"):
        part = path.relative_to(root).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for module in imported_modules(path):
            names = module.split(".")
            if names[0] == "relvit" and len(names) > 1 and names[1] not in GROUND:
                assert part not in GROUND, f"{path} imports {module}"
                assert FLOORS[names[1]] <= FLOORS[part], f"{path} (floor {FLOORS[part]}) imports {module}"
                checked += 1
            if part in ("ops", "layers", "models"):
                assert names[0] not in ("lightning", "matplotlib", "torchmetrics"), f"{path} imports {module}"
            if part == "ops":
                assert names[0] != "timm", f"{path} imports {module}"
    assert checked > 10


def test_fast_backends_never_import_the_reference():
    choosing = ("attention", "operations")
    ops = Path(relvit.__file__).parent / "ops"
    paths = [path for path in ops.rglob("*.py") if path.parent.stem != "reference" and path.stem not in choosing]
    assert len(paths) > 12
    for path in paths:
        assert not any("reference" in module for module in imported_modules(path)), path
