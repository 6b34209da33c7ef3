"""The start of the console script: `--help` without PyTorch, and no command loads a library that it does not use."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import relvit
import relvit_start
from relvit.app.cli import COMMANDS, main
from relvit.app.cli.functions import function_of

ROOT = Path(relvit_start.__file__).parent
# Only some commands use these libraries, each of which takes a tenth of a second or more to load.
HEAVY = {"sklearn", "pandas", "tensorboard", "onnx", "onnxruntime", "gradio"}


def loaded_after(program):
    """Return the libraries that a new process has loaded after it has run a program."""
    code = f"import sys\n{program}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], []])
def test_help_and_version_load_neither_pytorch_nor_the_package(arguments, capsys):
    program = f"import relvit_start; sys.argv = ['relvit', *{arguments}]; status = relvit_start.main()"
    done = loaded_after(f"{program}; assert status == {0 if arguments else 2}")
    assert {"torch", "timm", "relvit"}.isdisjoint(done.stderr.split())
    # `python -m relvit` prints the same text.
    assert main(arguments) == (0 if arguments else 2)
    assert done.stdout == capsys.readouterr().out
    assert arguments != ["--version"] or done.stdout == f"relvit {relvit.__version__}\n"


def test_other_commands_go_to_the_package(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["relvit", "fti"])
    assert relvit_start.main() == 2
    assert "did you mean 'fit'" in capsys.readouterr().err


def test_an_unknown_command_is_answered_without_pytorch(capsys):
    program = "import relvit_start; sys.argv = ['relvit', '--debug', 'trian', 'x']; assert relvit_start.main() == 2"
    done = loaded_after(program)
    assert {"torch", "timm", "relvit"}.isdisjoint(done.stderr.split())
    assert main(["trian", "x"]) == 2
    assert capsys.readouterr().err in done.stderr


@pytest.mark.parametrize("safe", ["", "1"])
def test_modules_of_the_current_folder_are_found_unless_python_is_to_be_safe(safe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    program = "import relvit_start; relvit_start.run = lambda arguments: 0; sys.argv = ['relvit', 'fit']"
    program += "; sys.path[:] = [path for path in sys.path if path]; relvit_start.main()"
    done = loaded_after(f"{program}; print({str(tmp_path)!r} in sys.path)")
    assert done.stdout == f"{not safe}\n"


def test_ctrl_c_while_libraries_are_loaded_prints_no_traceback(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(*_):
            raise KeyboardInterrupt

    monkeypatch.setenv(relvit_start.STARTER, "1")
    monkeypatch.delitem(sys.modules, "relvit.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted])
    assert relvit_start.run(["fit"]) == 130
    assert capsys.readouterr().err == "relvit: interrupted\n"


@pytest.mark.slow
def test_the_core_alone_names_the_extra_that_is_missing():
    """`import relvit` works without the application's packages, and the command line prints one line about them."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('lightning', 'jsonargparse', 'matplotlib', 'sklearn')))"
    purpose = "relvit.app (training, evaluation and the command line)"
    uses = "import relvit, relvit_start; relvit.models; status = relvit_start.run(['fit'])"
    done = loaded_after(f"{missing}; {uses}; assert status == 1")
    assert (
        done.stderr.splitlines()[0]
        == f'relvit: error: {purpose} needs the package lightning: pip install "relvit[train]"'
    )
    assert done.stdout == ""


@pytest.mark.slow
def test_the_core_alone_answers_what_needs_no_extra():
    """`python -m relvit` prints the same as the console script, although packages of the application are missing."""
    missing = "import runpy, sys; sys.modules.update(dict.fromkeys(('lightning', 'jsonargparse')))"
    lines = (["--help"], ["-h"], [], ["--debug", "--help"], ["--version"], ["trian", "x"])
    script, module = (
        loaded_after(
            f"{missing}\nfor arguments in {lines}:\n sys.argv = ['relvit', *arguments]\n try: {call}\n"
            " except SystemExit as end: print(arguments, end.code)"
        )
        for call in (
            "import relvit_start; sys.exit(relvit_start.main())",
            "runpy.run_module('relvit', run_name='__main__')",
        )
    )
    assert module.stdout == script.stdout
    assert [int(line.rpartition(" ")[2]) for line in module.stdout.splitlines() if line[:1] == "["] == [
        0,
        0,
        2,
        0,
        0,
        2,
    ]
    (unknown,) = script.stderr.splitlines()[:-1]
    assert unknown.startswith("relvit: error: unknown command 'trian' (did you mean ")
    assert unknown in module.stderr


def test_an_option_of_all_commands_may_stand_before_the_command(capsys, monkeypatch):
    monkeypatch.setenv("RELVIT_MAX_PIXELS", "9")
    monkeypatch.setattr(sys, "argv", ["relvit", "--max_pixels", "many", "fit"])
    assert relvit_start.main() == 2
    assert "--max_pixels must be a whole number, 1 or more, got 'many'" in capsys.readouterr().err
    assert main(["--max_pixels=9"]) == 2
    assert capsys.readouterr().out.startswith("usage: relvit COMMAND")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_says_what_the_functions_say(command):
    module, summary = COMMANDS[command]
    if command == "fit":
        return
    first = function_of(module, command).__doc__.splitlines()[0].split(". ")[0].removesuffix(".")
    assert first == f"{summary[0].upper()}{summary[1:]}"


def test_the_overview_fits_a_terminal():
    assert max(map(len, relvit_start.overview().splitlines())) <= 110


@pytest.mark.slow
def test_commands_load_no_library_that_they_do_not_use():
    commands = [["fit", "--help"], ["fit", "--lrr=3"], ["embed", "--help"], ["probe", "--help"]]
    # Run all calls in one process, because each start takes seconds.
    calls = [f"sys.argv = ['relvit', *{arguments}]; relvit_start.main()" for arguments in commands]
    done = loaded_after("\n".join(["import relvit_start", *calls]))
    assert HEAVY.isdisjoint(done.stderr.splitlines()[-1].split())
    assert "--lr" in done.stderr
    assert done.stdout.count("usage: relvit ") == 3


def test_a_release_has_the_start_beside_the_package_and_the_configurations_inside():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"relvit": "relvit_start:main"}
    targets = project["tool"]["hatch"]["build"]["targets"]
    assert {"relvit", "relvit_start.py", "configs"} <= set(targets["wheel"]["only-include"])
    assert {"/relvit", "/relvit_start.py", "/configs", "/.ci/run"} <= set(targets["sdist"]["include"])
    assert targets["wheel"]["sources"] == {"configs": "relvit/configs"}
