"""The versions of PyTorch and timm that relvit accepts, and the error for older ones."""

import importlib.metadata
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import timm
import torch
from packaging.requirements import Requirement

import relvit.app
from relvit.version import OLDEST, __version__, check_versions

ROOT = Path(relvit.__file__).parents[1]


def test_they_are_those_of_the_package():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{name}>={oldest}" for name, oldest in OLDEST.items()} <= set(needed)
    assert all(f"{name} {oldest}" in (ROOT / "README.md").read_text() for name, oldest in OLDEST.items())


def test_citation_and_changelog_have_the_version():
    assert set(re.findall("^ *version: (.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)) == {__version__}
    assert re.findall("^## ([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == __version__


@pytest.mark.slow
def test_importing_relvit_with_an_older_timm_says_what_to_install():
    code = "import timm, relvit_start; timm.__version__ = '1.0.25'; relvit_start.run(['fit']); import relvit"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    answer = 'relvit needs timm>=1.0.26, got timm 1.0.25: pip install --upgrade "timm>=1.0.26"'
    lines = done.stderr.splitlines()
    # The command prints one line, and in Python the message is the last line.
    assert (lines[0], lines[-1]) == (f"relvit: error: {answer}", f"ImportError: {answer}")


def test_versions_are_compared_as_numbers(monkeypatch):
    for version in ("2.8.0a0+nv25.06", "2.8.1+cu128", "2.10.0", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        check_versions()
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    monkeypatch.setattr(timm, "__version__", "0.9.16")
    needed = r"relvit needs torch>=2\.8 and timm>=1\.0\.26, got torch 2\.7\.1\+cu126 and timm 0\.9\.16"
    with pytest.raises(ImportError, match=rf'^{needed}: pip install --upgrade "torch>=2\.8" "timm>=1\.0\.26"$'):
        check_versions()


def test_the_application_says_which_of_its_packages_is_too_old(monkeypatch):
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    needed = {found.name: found.specifier for found in map(Requirement, lines)}
    for name, oldest in relvit.app.OLDEST.items():
        assert f">={oldest}" in map(str, needed["scikit-learn" if name == "sklearn" else name])
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.9" if name == "torchmetrics" else installed(name)
    )
    answer = 'relvit.app needs torchmetrics>=1.4, got torchmetrics 0.9: pip install --upgrade "torchmetrics>=1.4"'
    with pytest.raises(ImportError, match=re.escape(answer)):
        runpy.run_path(relvit.app.__file__)


def test_the_application_says_that_windows_lacks_what_it_needs(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fcntl" else found(name))
    with pytest.raises(ImportError, match="needs Linux or macOS: on Windows use the Windows Subsystem"):
        runpy.run_path(relvit.app.__file__)
