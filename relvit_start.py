"""Start of the console script `relvit`: `--help` without PyTorch; how long waiting threads spin, set before its import.

The module stands beside the package and imports nothing of the package (it runs two files alone), because importing
`relvit` loads PyTorch and timm, which takes seconds. `relvit.app.cli` runs all other commands, and `python -m relvit`
begins there.
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
# Command -> (the module that runs it, one line of help). A module has a function of the command's name, whose arguments
# are the options and whose docstring begins with that line; `fit` is Lightning's command line. A new command also
# needs a line of use in `LINES` of tests/app/cli/test_usage.py.
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

# Other libraries call a command by one of these names.
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
    # relvit has no command for these names.
    "": "cross-validate cross-validation",
}

# This limit is as fast as none on an idle machine, and several times as fast on a busy one (tools/speed/busy.py).
SPIN_COUNT = "20000"

# This environment variable tells processes that Lightning starts which process is the main one.
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
    # last in `sys.path`, so that no file in it hides an installed module.
    sys.path.append(os.getcwd())
    return run(arguments)


def run(arguments: Sequence[str]) -> int:
    """Run a command of the application and return its exit status, or say which packages are missing or too old."""
    end_with_starter()
    try:
        import relvit.app  # noqa: F401
    except ImportError as error:
        print(f"relvit: error: {error}", file=sys.stderr)
        return 1
    from relvit.app.cli import main as run_command

    return run_command(arguments)


def end_with_starter() -> None:
    """Let a process that Lightning starts beside the main one end where the main process has ended, however it ended.

    A main process that is killed cannot end the other processes, which would then wait for the main process for ever:
    Lightning starts them before they have a connection that could break.
    """
    starter = os.environ.get(STARTER)
    if "LOCAL_RANK" not in os.environ or starter is None:
        os.environ[STARTER] = str(os.getpid())
    else:
        threading.Thread(target=_wait_for_end_of, args=[int(starter)], daemon=True).start()


def _wait_for_end_of(starter: int) -> None:
    # The system gives a process whose parent has ended another parent.
    while os.getppid() == starter:
        time.sleep(1)
    os._exit(1)


def prepare_environment() -> None:
    """Let threads of PyTorch that wait sleep soon, unless the user's environment says how they wait.

    OpenMP's threads wait for the next task in a loop, which on a busy machine takes the cores from working threads.
    GNU's OpenMP, which PyTorch's wheels for Linux contain, repeats this loop up to 300,000 times. The library reads the
    limit of the loop once, when PyTorch is loaded.
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
    # `relvit.app.cli` takes the option `--max_pixels` away, which may stand before the command.
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
