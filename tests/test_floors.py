"""Imports within relvit follow the order in CONTRIBUTING.md, packages are declared, and folders stay small."""

import ast
import importlib
import re
import sys
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import relvit

ROOT = Path(relvit.__file__).parent
# Each folder may import from these folders and from itself. The application, `relvit.app`, may import from all of them.
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
    "app.models": (*_ALL, "app.utils"),
    "app.data": (*_ALL, "app.utils", "app.plots", "app.models"),
    "app.training": (*_ALL, "app.utils", "app.plots", "app.models", "app.data"),
    "app.evaluation": (*_ALL, "app.utils", "app.plots", "app.models", "app.data", "app.training"),
    "app.cli": (*_ALL, "app.utils", "app.plots", "app.models", "app.data", "app.training", "app.evaluation"),
}
# The core may import these packages, which `pip install relvit` installs.
PACKAGES = {"torch", "torchvision", "timm", "einops", "packaging", "safetensors", "huggingface_hub", "numpy"}
# Several files may have these names: an operation, its reference and its layer, or the base class in a folder.
SHARED_NAMES = {"__init__", "attention", "operation", "reference", "base"}
# These packages are imported only if they are installed, for GPU kernels and for models of these libraries.
OPTIONAL = {"triton", "transformers", "segment_anything"}


def folder_of(names):
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
        if (folder := folder_of(names)) not in BELOW:
            assert len(names) == 1 or names == ("app", "__init__.py")
            continue
        for module in imported_modules(path):
            package, *inside = module.split(".")
            if package == "relvit" and inside and inside[0] != "version":
                assert folder_of(inside) in (folder, *BELOW[folder]), f"{path} imports {module}"
                checked += 1
            if folder == "ops":
                assert package != "timm", f"{path} imports {module}"
    assert checked > 300


# The application may import the names in `__all__` of these parts of the core, and small helpers of `utils`.
PUBLIC_FOLDERS = {
    "ops",
    "ops.reference",
    "layers",
    "models",
    *(f"families.{path.name}" for path in (ROOT / "families").iterdir()),
}


def test_the_application_uses_the_core_by_its_public_names():
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            module = node.module
            package, _, folder = module.partition(".")
            if package != "relvit" or folder.split(".")[0] not in CORE or folder.startswith("utils"):
                continue
            for alias in node.names:
                assert folder in PUBLIC_FOLDERS, f"{path} imports {module}"
                assert alias.name in importlib.import_module(module).__all__, f"{path} imports {module}.{alias.name}"


def test_the_core_imports_only_packages_that_it_declares():
    for folder in CORE:
        for path in (ROOT / folder).rglob("*.py"):
            for module in imported_modules(path):
                package = module.split(".")[0]
                known = package in PACKAGES | OPTIONAL or package == "relvit" or package in sys.stdlib_module_names
                assert known, f"{path} imports {module}"


# These packages have another name on the package index than in imports.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "pytorch_grad_cam": "grad-cam"}


# These are programs, plugins of pytest and MkDocs, and packages that other libraries import.
NOT_IMPORTED = {"ruff", "pre-commit", "pytest-xdist", "mkdocs", "mkdocs-material", "mkdocstrings"}
NOT_IMPORTED |= {"tensorboard", "wandb", "mlflow", "accelerate", "ipykernel"}


def declared_packages():
    """Return the packages of the core and of each extra in pyproject.toml, without those of other extras."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"]} | project["optional-dependencies"]
    names = {extra: {re.match(r"[\w.-]+", line)[0] for line in lines} for extra, lines in extras.items()}
    return {extra: {distribution(name) for name in found} - {"relvit"} for extra, found in names.items()}


def distribution(package):
    return DISTRIBUTIONS.get(package, package).lower().replace("_", "-")


def test_the_application_imports_only_packages_that_are_declared():
    used = {module.split(".")[0] for path in (ROOT / "app").rglob("*.py") for module in imported_modules(path)}
    used -= {"relvit", "relvit_start", *sys.stdlib_module_names}
    assert {distribution(package) for package in used} - set(chain(*declared_packages().values())) == set()


def test_packages_that_are_declared_are_imported():
    """relvit itself imports the packages of the core and of `train`; tests, tools or pages import the others."""
    repository, statement = ROOT.parent, re.compile(r"""(?:^|\n|")\s*(?:from|import) (\w+)|importorskip\("(\w+)""")
    found = {}
    for folders in (("relvit",), ("relvit", "tests", "tools", "docs", "notebooks")):
        paths = chain(*((repository / folder).rglob("*") for folder in folders))
        texts = (path.read_text() for path in paths if path.suffix in (".py", ".md", ".ipynb"))
        found[folders] = {distribution("".join(names)) for text in texts for names in statement.findall(text)}
    by_relvit, by_all = found.values()
    for extra, names in declared_packages().items():
        unused = names - (by_relvit if extra in ("", "train") else by_all) - NOT_IMPORTED
        assert not unused, f"{extra or 'dependencies'} declares {unused}"


def test_what_has_no_author_on_the_index_is_named_with_its_hash():
    named = (ROOT.parent / "tests" / "segment_anything.txt").read_text()
    assert re.fullmatch(r"(#.*\n)*segment-anything==1\.0 --hash=sha256:[0-9a-f]{64}\n", named)
    assert not any("segment-anything" in names for names in declared_packages().values())


def test_the_root_holds_the_package_alone():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "version.py"}


def test_folders_stay_small():
    tests = Path(__file__).parent
    tops = (ROOT, tests, tests.parent / "tools")
    for folder in (path for top in tops for path in (top, *top.rglob("*")) if path.is_dir()):
        # `positions` has a file for each paper, which its table `POSITIONS` lists, so it may have more files.
        assert len(list(folder.glob("*.py"))) <= 12 or folder == ROOT / "layers" / "positions", folder


def test_fast_backends_never_import_the_reference():
    for path in (ROOT / "ops").rglob("*.py"):
        if path.parent.stem != "reference" and path != ROOT / "ops" / "attention.py":
            assert not any("reference" in module for module in imported_modules(path)), path


def test_files_have_names_of_their_own():
    names = Counter(path.stem for path in ROOT.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES
