"""Pages of docs/elsewhere: commands and Python blocks run in order, with the packages of the page's extra."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from documents import ELSEWHERE, ROOT, text
from packaging.requirements import Requirement

pytestmark = pytest.mark.elsewhere

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def requirements(page):
    """Return the requirements of the extras that a page installs, without relvit's own requirements."""
    extras = re.findall(r'pip install -e "\.\[([\w,]+)\]"', text(page))
    found = [requirement for given in extras for extra in given.split(",") for requirement in EXTRAS[extra]]
    return [requirement for requirement in found if not requirement.startswith("relvit[")]


def skip_without(page):
    """Skip a page whose packages are not installed; pytest's summary then names the page and the package."""
    for requirement in map(Requirement, requirements(page)):
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{page} was not run, because {requirement} is not installed")
        if found not in requirement.specifier:
            pytest.skip(f"{page} was not run: it needs {requirement}, and {found} is installed")


def script(page):
    """Return the blocks of a page as one script, which runs commands as processes."""
    lines = ["import subprocess, sys"]
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", text(page), re.DOTALL):
        if language == "python":
            lines.append(block)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = shlex.split(line, comments=True)
            if command[:1] == ["relvit"]:
                lines.append(f"subprocess.run([sys.executable, '-m', *{command}], check=True)")
    return "\n".join(lines)


def run(code):
    """Run a page in a new process, in which nothing is imported except by the page."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", ELSEWHERE)
def test_pages_run(page, place):
    skip_without(page)
    run(script(page))


def test_the_page_on_pretraining_takes_an_encoder_with_prefix_tokens(place):
    page = "docs/elsewhere/pretraining.md"
    skip_without(page)
    of_the_page = 'timm.create_model("relvit_tiny_patch4_32", depth=4, num_classes=0)'
    options = "img_size=32, patch_size=4, embed_dim=48, depth=1, num_heads=3, num_classes=0"
    code = script(page)
    assert of_the_page in code
    run(code.replace(of_the_page, f'relvit.retrofit(timm.create_model("vit_tiny_patch16_224", {options}))'))


@pytest.mark.parametrize("page", ELSEWHERE)
def test_pages_are_short_and_name_the_versions(page):
    assert len(text(page).split()) <= 400
    assert requirements(page)
    for requirement in requirements(page):
        assert f"`{requirement}`" in text(page), requirement
