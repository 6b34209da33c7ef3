"""Pages of docs/elsewhere: commands and Python blocks of each run in their order, with the packages of its extra."""

import re
import shlex
import tomllib
from importlib import metadata

import pytest
from documents import ELSEWHERE, ROOT, text
from packaging.requirements import Requirement

from relvit.cli import main

pytestmark = pytest.mark.elsewhere

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def requirements(page):
    """Return the requirements of the extras that a page has installed."""
    extras = re.findall(r'pip install -e "\.\[([\w,]+)\]"', text(page))
    return [requirement for given in extras for extra in given.split(",") for requirement in EXTRAS[extra]]


def skip_without(page):
    """Skip a page whose packages are not installed; pytest's summary then has the page and the package."""
    for requirement in map(Requirement, requirements(page)):
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{page} was not run, because {requirement} is not installed")
        if found not in requirement.specifier:
            pytest.skip(f"{page} was not run: it needs {requirement}, and {found} is installed")


@pytest.mark.parametrize("page", ELSEWHERE)
def test_pages_run(page, place, capsys):
    skip_without(page)
    names = {}
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", text(page), re.DOTALL):
        if language == "python":
            exec(compile(block, page, "exec"), names)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = shlex.split(line, comments=True)
            if command[:1] == ["relvit"]:
                assert main(command[1:]) == 0, (line, capsys.readouterr().err)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_pages_are_short_and_name_the_versions(page):
    assert len(text(page).split()) <= 400
    assert requirements(page)
    for requirement in requirements(page):
        assert f"`{requirement}`" in text(page), requirement
