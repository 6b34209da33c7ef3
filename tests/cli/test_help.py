"""The help of each command: short, without data, and true to the parsers behind it."""

import importlib
import inspect
import re

import pytest
import yaml

from relvit.cli import COMMANDS, main
from relvit.cli.aliases import ALIASES, POSITIONALS
from relvit.cli.help import OPTIONS, WIDTH, Option

TRAINER = ("fit", "validate", "test", "predict")
FUNCTIONS = tuple(command for command in COMMANDS if command not in TRAINER)


def listed(command: str) -> list[Option]:
    return [option for options in OPTIONS[command].values() for option in options]


def long_name(option: Option) -> str | None:
    """The option without its dashes and what stands for a name of the user's; None for arguments without a name."""
    found = re.search(r"--([\w.]+?)(\.X)?$", option.name)
    return found[1] if found else None


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_short_and_in_sentences(command, capsys):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= WIDTH + 5
    assert lines[0].startswith(f"usage: relvit {command} ")
    for option in listed(command):
        assert re.fullmatch(r"[A-Z].*[.)]|.*\.\.\.|.*: .*", option.text), option
    assert main([command, "-h"]) == 0


@pytest.mark.parametrize("command", TRAINER)
def test_all_options_exist(command, run, photos, capsys):
    """With the defaults that the help shows."""
    data = [f"--root={photos}"] if command == "fit" else [str(run / "checkpoints" / "best.ckpt")]
    assert main([command, *data, "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert main([command, "--help-all"]) == 0
    everything = capsys.readouterr().out
    for option in listed(command):
        name = long_name(option)
        if name is None or name in ("data", "config", "paths"):
            continue
        own = ALIASES[command].get(f"--{name}", f"--{name}").removeprefix("--")
        found = config
        for key in own.split("."):
            # The data's options are below the class that was chosen.
            found = found.get("init_args", found)
            assert key in found, f"{own} is no option of {command}"
            found = found[key]
        if own.startswith(("model.", "trainer.")):
            assert f"--{own} " in everything
        shown = {"true": True, "false": False}.get(option.default, option.default)
        if shown is not None and own != "data.on_error" and found is not None:
            same = float(shown) == float(found) if isinstance(found, int | float) else shown == found
            assert same, f"--{own} is {found} by default, not {shown}"


@pytest.mark.parametrize("command", FUNCTIONS)
def test_functions_list_all_their_arguments(command, capsys):
    module = importlib.import_module(COMMANDS[command][0])
    function = next(getattr(module, name) for name in (command, "check") if hasattr(module, name))
    arguments = inspect.signature(function).parameters
    options = {long_name(option): option for option in listed(command) if long_name(option)}
    assert options.keys() == arguments.keys()
    for name, option in options.items():
        if option.default is not None:
            assert option.default == str(arguments[name].default)
    assert {name.removeprefix("--") for name in POSITIONALS[command]} <= options.keys()
    assert main([command, "--help-all"]) == 0
    assert "--print_config" in capsys.readouterr().out


def test_options_of_data_without_a_choice(capsys):
    assert main(["fit", "--data.help", "ImageFolderData"]) == 0
    assert "--data.val_fraction" in capsys.readouterr().out
