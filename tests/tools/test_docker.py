"""The Dockerfile, without building it: its files exist, and its commands are commands of relvit."""

import json
import re
import shlex
import tomllib
from pathlib import Path

from relvit.app.cli import COMMANDS
from relvit.app.cli.functions import function_of
from relvit.app.cli.typed_words import read_arguments

ROOT = Path(__file__).parents[2]


def test_files_and_commands_exist():
    text = (ROOT / "tools" / "docker" / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [source for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for source in line.split()]
    assert all((ROOT / source).exists() for source in copied)
    assert {project["readme"], "LICENSE", "relvit"} <= set(copied)
    assert re.search(r'"/src\[(\w+)\]"', text)[1] in project["optional-dependencies"]
    python = re.search(r"^FROM python:([\d.]+)", text, re.MULTILINE)[1]
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    program, command = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    assert program in project["scripts"]
    assert command in COMMANDS
    build, run = (shlex.split(line) for line in re.findall(r"^#   (docker .*)$", text, re.MULTILINE))
    assert (ROOT / build[build.index("-f") + 1]).is_file()
    name = build[build.index("-t") + 1]
    given = run[run.index(name) + 1 :]
    found = read_arguments("predict", function_of(COMMANDS["predict"][0], "predict"), given)
    assert found.values == {"ckpt_path": "model.onnx", "paths": ["photos"]}
