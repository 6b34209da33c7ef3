"""Start of the console script `relvit`: `--help` without PyTorch; how long waiting threads spin, set before its import.

Importing `relvit` loads PyTorch and timm, which takes seconds. So this module stands beside the package, and answers
`--help`, `--version` and unknown commands without importing the package: it only runs single files of it, see `_read`.
`relvit.app.cli` runs the commands. `python -m relvit` uses the functions of this module, too.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COMMANDS = "relvit.app.cli.commands"
_DEPLOY = f"{_COMMANDS}.deploy"
# Key: the command. Value: the module that runs it, and its line in `relvit --help`. The module has a function of the
# command's name: its arguments are the options, and its docstring begins with the line of help. Only `fit` differs: it
# is Lightning's command line. `relvit COMMAND --help` is made in `relvit/app/cli/help.py`, whose tables can shorten the
# texts of options and name their values. A new command also needs a line of use in `LINES` of
# tests/app/cli/test_usage.py.
COMMANDS = {
    "fit": ("relvit.app.cli.fit.fit", "train a model on images; the run gets a folder of its own"),
    "validate": (f"{_COMMANDS}.validate", "validate a checkpoint, at any image size (--img_size)"),
    "test": (f"{_COMMANDS}.test", "test a checkpoint: metrics per class, confusion matrix, worst mistakes"),
    "predict": (f"{_COMMANDS}.predict", "write the classes of each image into predictions.csv"),
    "resolutions": (
        f"{_COMMANDS}.resolutions",
        "evaluate checkpoints at several image sizes: accuracy, calibration, speed, memory",
    ),
    "embed": (f"{_COMMANDS}.embed", "write the features of all images below a folder"),
    "probe": (f"{_COMMANDS}.probe", "evaluate the features of any models by k-NN and a linear classifier"),
    "export": (
        f"{_DEPLOY}.export",
        "write an ONNX file or torch.export program, and compare its outputs at two image sizes",
    ),
    "publish": (f"{_DEPLOY}.publish", "write a folder or Hugging Face repository that timm.create_model loads"),
    "show": (f"{_COMMANDS}.show", "draw what a model has learned: position tables, attention, Grad-CAM"),
    "demo": (f"{_DEPLOY}.demo", "open a page: drop an image, choose its size, see classes, attention and positions"),
    "explain": (f"{_COMMANDS}.explain", "print what a model's attention layers compute, which backend, and why"),
    "average": (f"{_COMMANDS}.average", "write the mean of several checkpoints' weights as one checkpoint"),
    "calibrate": (
        f"{_COMMANDS}.calibrate",
        "fit a temperature to validation images, and write the checkpoint with the temperature in it",
    ),
    "check-data": (f"{_COMMANDS}.check_data", "decode all images: broken files, classes, sizes, duplicates"),
}

# Key: the command. Value: names of similar commands in other libraries. If a user types one of these names, the error
# asks whether the user meant the command.
ELSEWHERE = {
    "fit": "train finetune fine-tune resume",
    "validate": "val valid",
    "test": "eval evaluate",
    "predict": "infer inference classify",
    "resolutions": "sizes benchmark",
    "embed": "features extract",
    "probe": "knn linear",
    "export": "convert onnx",
    "publish": "push upload",
    "show": "plot visualize visualise attention heatmap gradcam cam saliency interpret explainability",
    "demo": "serve app gradio",
    "explain": "info summary",
    "average": "soup swa ensemble",
    "check-data": "check data",
    # relvit has no such command. Without this entry, the error about these names would suggest 'validate'.
    "": "cross-validate cross-validation",
}

# How often a waiting thread repeats its loop before it sleeps, see `prepare_environment`. With this limit PyTorch is as
# fast as without a limit on an idle machine, and several times as fast on a busy machine (see tools/speed/busy.py).
SPIN_COUNT = "20000"

# This environment variable holds the id of the main process, for the processes that Lightning starts beside it.
STARTER = "RELVIT_STARTER"

EXAMPLES = """examples:
  relvit fit --config digits
  relvit fit --config folder --root photos --model relvit_tiny --epochs 50
  relvit validate runs/RUN --img_size 288
  relvit predict runs/RUN photo.jpg more/photos 'others/*.png'
"""


def main() -> int:
    """Run the command that the user typed, and return its exit status."""
    arguments = sys.argv[1:]
    if (status := answer(arguments)) is not None:
        return status
    prepare_environment()
    # As with `python -m relvit`, the user can name modules in the current folder (--data my_module.Mine). The folder is
    # last in `sys.path`, so that no file in it hides an installed module. The flag is set by PYTHONSAFEPATH, with which
    # `python -m relvit` leaves the folder out, too: libraries also look there for optional modules.
    if not sys.flags.safe_path:
        sys.path.append(os.getcwd())
    return run(arguments)


def run(arguments: Sequence[str]) -> int:
    """Run a command of the application and return its exit status, or say which packages are missing or too old.

    The imports take seconds, in which the user may press Ctrl-C, as at any later time: the exit status is then 130.
    """
    end_with_starter()
    try:
        import relvit.app  # noqa: F401 (raises ImportError if a package is missing or too old)
        from relvit.app.cli import main as run_command

        return run_command(arguments)
    except ImportError as error:
        print(f"relvit: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("relvit: interrupted", file=sys.stderr)
        return 130


def end_with_starter() -> None:
    """Let a process that Lightning starts beside the main one end where the main process has ended, however it ended.

    A main process that is killed cannot end the other processes. If these have no connection to it yet, they would not
    notice its end, and would wait for it for ever.
    """
    starter = os.environ.get(STARTER)
    if "LOCAL_RANK" not in os.environ or starter is None:
        os.environ[STARTER] = str(os.getpid())
    else:
        threading.Thread(target=_wait_for_end_of, args=[int(starter)], daemon=True).start()


def _wait_for_end_of(starter: int) -> None:
    # When the parent of a process ends, the operating system gives the process another parent.
    while os.getppid() == starter:
        time.sleep(1)
    os._exit(1)


def prepare_environment() -> None:
    """Let threads of PyTorch that wait sleep soon, unless the user's environment says how they wait.

    OpenMP's threads wait for the next task in a loop. On a busy machine these loops take the cores from threads that
    work. GNU's OpenMP, which PyTorch's wheels for Linux contain, repeats the loop up to 300,000 times before a thread
    sleeps. The environment variable GOMP_SPINCOUNT changes this limit, but must be set before PyTorch is loaded.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def answer(arguments: Sequence[str]) -> int | None:
    """Answer no command, `--help`, `--version` and unknown commands; return the exit status, or None for a command."""
    typed = [argument for argument in arguments if argument != "--debug"]
    if not typed or typed[0] in ("-h", "--help"):
        print(overview())
        return 0 if typed else 2
    if typed[0] == "--version":
        print(f"relvit {version()}")
        return 0
    # The option `--max_pixels` may stand before the command; `relvit.app.cli` reads and removes it.
    if typed[0] in COMMANDS or typed[0].partition("=")[0] == "--max_pixels":
        return None
    print(unknown_command(typed[0]), file=sys.stderr)
    return 2


def version() -> str:
    """Read the version from the package's file."""
    return _read("version.py")["__version__"]


def unknown_command(command: str) -> str:
    """Return what to say of a word that is no command: the command that is likely meant, and all commands."""
    messages = _read("utils/messages.py")
    others = {other: own for own, names in ELSEWHERE.items() for other in names.split()}
    found = messages["nearest"](command, [*COMMANDS, *others])
    meant = others.get(found, found)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    known = messages["listing"](list(COMMANDS), len(COMMANDS))
    return _read("app/utils/shown_text.py")["visible_lines"](
        f"relvit: error: unknown command {command!r}{hint}; commands: {known}"
    )


def _read(file: str) -> dict[str, Any]:
    """Run a file of the package without the package, whose import loads PyTorch, and return its names."""
    return runpy.run_path(str(Path(__file__).with_name("relvit") / file))


def overview() -> str:
    """Return the text of `relvit --help`."""
    lines = ["usage: relvit COMMAND [options]", "", "commands:"]
    lines += [f"  {command:<12} {text}" for command, (_, text) in COMMANDS.items()]
    lines += ["", "relvit COMMAND --help lists a command's options; --debug shows the traceback of an error;"]
    lines += ["--max_pixels N refuses larger images (250000000); relvit --version shows the version.", "", EXAMPLES]
    return "\n".join(lines)
