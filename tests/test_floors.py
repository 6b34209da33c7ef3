"""Imports inside relvit only point down, in the order that CONTRIBUTING.md gives, and folders stay small."""

import ast
import re
import sys
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import relvit

ROOT = Path(relvit.__file__).parent
# Every folder may import from these folders and from itself. The application, `relvit.app`, stands above the core.
CORE = {
    "utils": (),
    "ops": ("utils",),
    "layers": ("utils", "ops"),
    "models": ("utils", "ops", "layers"),
    "families": ("utils", "ops", "layers", "models"),
}
_ALL = tuple(CORE)
BELOW = CORE | {
    "app.utils": ("utils",),
    "app.plots": ("utils", "app.utils"),
    "app.data": (*_ALL, "app.utils", "app.plots"),
    "app.training": (*_ALL, "app.utils", "app.plots", "app.data"),
    "app.evaluation": (*_ALL, "app.utils", "app.plots", "app.data", "app.training"),
    "app.cli": (*_ALL, "app.utils", "app.plots", "app.data", "app.training", "app.evaluation"),
}
# The packages that the core imports: what `pip install relvit` brings.
PACKAGES = {"torch", "torchvision", "timm", "einops", "packaging", "safetensors", "huggingface_hub", "numpy"}
# One thing in several folders: operation, its reference and its layer; base of a folder; kernels of two operations.
SHARED_NAMES = {"__init__", "attention", "reference", "base", "forward", "backward", "launch"}
# Imported only where the user has them: for kernels on a GPU, and for models of these libraries.
OPTIONAL = {"triton", "transformers", "segment_anything"}


def room_of(names):
    return ".".join(names[: 2 if names[0] == "app" else 1])


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_down():
    checked = 0
    for path in ROOT.rglob("*.py"):
        names = path.relative_to(ROOT).parts
        if (room := room_of(names)) not in BELOW:
            assert len(names) == 1 or names == ("app", "__init__.py")
            continue
        for module in imported_modules(path):
            package, *inside = module.split(".")
            if package == "relvit" and inside and inside[0] != "version":
                assert room_of(inside) in (room, *BELOW[room]), f"{path} imports {module}"
                checked += 1
            if room == "ops":
                assert package != "timm", f"{path} imports {module}"
    assert checked > 300


def test_the_core_imports_only_packages_that_it_declares():
    for room in CORE:
        for path in (ROOT / room).rglob("*.py"):
            for module in imported_modules(path):
                package = module.split(".")[0]
                known = package in PACKAGES | OPTIONAL or package == "relvit" or package in sys.stdlib_module_names
                assert known, f"{path} imports {module}"


# Packages whose name differs from the name that is imported.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "pytorch_grad_cam": "grad-cam"}


def test_the_application_imports_only_packages_that_are_declared():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines}
    used = {module.split(".")[0] for path in (ROOT / "app").rglob("*.py") for module in imported_modules(path)}
    used -= {"relvit", "relvit_start", *sys.stdlib_module_names}
    names = {DISTRIBUTIONS.get(package, package).lower().replace("_", "-") for package in used}
    assert names - declared == set()


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


def test_files_of_the_core_have_names_of_their_own():
    names = Counter(path.stem for room in CORE for path in (ROOT / room).rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES
