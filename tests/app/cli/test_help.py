"""The help of each command is short, has complete sentences and the real defaults, and loads no data."""

import itertools
import re
import subprocess
import sys

import pytest
import yaml

from relvit.app.cli import COMMANDS, main
from relvit.app.cli.functions import function_of
from relvit.app.cli.help import WIDTH, shown_options
from relvit.app.cli.typed_words import short_names


def test_a_folder_is_no_file(capsys):
    for command, value in (("show", "DIR"), ("resolutions", "FILE|DIR"), ("probe", "FILE|DIR"), ("embed", "FILE")):
        assert main([command, "--help"]) == 0
        assert f"--output {value} " in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_it_names_the_help_of_a_kind_of_data_where_there_is_one(command, capsys):
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    words = [command, *(["a.ckpt"] if command == "probe" else []), "--data.help", "DigitsData"]
    assert ("--data.help" in text) == (main(words) == 0)
    # In evaluation, `--root` alone keeps the kind of data of the training.
    assert ("--root alone" in text) == (command in ("fit", "probe", "check-data"))


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_short_and_has_a_sentence_for_each_option(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= WIDTH + 5
    assert lines[0].startswith(f"usage: relvit {command} ")
    entries = re.findall(r"^  (\S.*\n(?: {10}.*\n)*)", text, re.MULTILINE)
    assert len(entries) >= 2
    for entry in entries:
        assert re.search(r"[.)]$", " ".join(entry.split())), entry
    assert ":func:" not in text


# With `python -OO` all libraries would be compiled, too; the texts of help come from these three.
BARE = """
from importlib.machinery import SourceFileLoader

cached = SourceFileLoader.get_code

def get_code(self, name):
    if name.partition(".")[0] not in ("relvit", "lightning", "jsonargparse"):
        return cached(self, name)
    path = self.get_filename(name)
    return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=2)

SourceFileLoader.get_code = get_code
from jsonargparse import ArgumentParser
from lightning import Trainer
from relvit.app.cli import COMMANDS, main

assert [each.__doc__ for each in (ArgumentParser, Trainer, main)] == [None, None, None]
print({main([each, "--help"]) for each in COMMANDS})
"""


@pytest.mark.slow
def test_it_needs_no_docstrings():
    ended = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=300)
    assert (ended.stderr, ended.stdout.splitlines()[-1]) == ("", "{0}")
    assert "\n\nValidate a checkpoint, at any image size (--img_size).\n" in ended.stdout


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_all_options_exist_with_the_defaults_that_it_shows(command, run, photos, capsys):
    data = [f"--root={photos}"] if command == "fit" else [str(run / "checkpoints" / "best.ckpt")]
    assert main([command, *data, "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert main([command, "-h"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    function = function_of(COMMANDS[command][0], command)
    short = short_names(command, function)
    for name in itertools.chain.from_iterable(shown_options(function).values()):
        if name in ("data", "config"):
            continue
        found = config
        for key in short.get(name, name).removesuffix(".X").split("."):
            # The data's options are nested below `init_args` of the chosen class.
            found = found.get("init_args", found)
            assert key in found, f"{name} is no option of {command}"
            found = found[key]
        shown = re.search(rf"--{re.escape(name)} (?:(?! --).)*?Default: (\S+)\.( |$)", text)
        if shown is not None and found is not None:
            assert shown[1].lower() == str(found).lower(), f"--{name} is {found} by default, not {shown[1]}"


def test_every_option_of_a_function_and_of_one_kind_of_data(capsys):
    assert main(["embed", "--help-all"]) == 0
    assert "--num_workers" in capsys.readouterr().out
    for command in ("fit", "test"):
        assert main([command, "--data.help", "ImageFolderData"]) == 0
        assert "--data.val_fraction" in capsys.readouterr().out
