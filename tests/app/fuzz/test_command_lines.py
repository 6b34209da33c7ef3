"""Command lines with random changes: each works or is refused in one or two lines; none hangs or shows a traceback.

FUZZ_EXAMPLES=200 pytest -m fuzz tests/app/fuzz/test_command_lines.py --hypothesis-seed=31
"""

import faulthandler
import io
import re
import shutil
import sys
from pathlib import Path

import pytest
from fuzzed import fuzzed
from hypothesis import note
from photos import TINY

from relvit.app.cli import main

pytestmark = pytest.mark.fuzz

FIT = ["fit", "--data=ImageFolderData", "--data.root=photos", *TINY, "--trainer.fast_dev_run=true", "--runs=runs"]
# Users type such lines. Every command that ends by itself has one.
HONEST = [
    FIT,
    [*FIT, "--lr", "3e-4", "--epochs", "2", "--model.weight_decay", "0", "--patience", "3"],
    [*FIT, "--model.warmup_epochs", "0.5", "--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=1"],
    [*FIT, "--trainer.limit_train_batches", "0.5", "--trainer.check_val_every_n_epoch", "2", "--save_every", "5"],
    ["fit", "--config", "folder", "--root", "photos", *TINY, "--trainer.fast_dev_run=true", "--runs=runs"],
    ["validate", "best.ckpt", "--img_size", "24", "--accelerator", "cpu"],
    ["test", "best.ckpt", "--split", "val", "--runs", "runs", "--batch_size", "3"],
    ["predict", "best.ckpt", "photos/test", "--runs", "runs", "--img_size", "[16,24]"],
    ["resolutions", "best.ckpt", "--sizes", "16", "24"],
    ["embed", "best.ckpt", "photos/test", "--output", "features.csv"],
    ["average", "best.ckpt", "other.ckpt", "--output", "averaged.ckpt"],
    ["show", "best.ckpt", "photos/test/owl/0.jpg", "--kind", "kernels", "--output", "shown"],
    ["explain", "relvit_tiny", "--img_size", "32"],
    ["check-data", "photos"],
    ["calibrate", "best.ckpt", "--root", "photos", "--output", "calibrated.ckpt"],
]
VALUES = ["", "x", "-1", "0", "-0.5", "1e400", "nan", "inf", "999999999999", "[", "[1,", "{a: 1}", "null", "true"]
VALUES += [
    "../x",
    "\x1b[31m",
    "\u202ex",
    "1,2",
    "3.7",
    "[16,24,32]",
    "relvit_small",
    "a b",
    "é",
    "-",
    "--",
    "=",
    "x" * 500,
]
# The list has options of other commands and libraries, and options that could start many processes or take all memory.
OPTIONS = ["--gpus", "--epoch", "--output", "--split", "--img-size", "--model.lr", "--config", "--ckpt_path", "--reach"]
OPTIONS += ["--devices", "--batch_size", "--num_workers", "--resume", "--data", "--model", "--trainer.strategy", "--x"]
OPTIONS += ["--model.num_classes", "--model.model_kwargs.depth", "--model.model_kwargs.num_heads", "--data.img_size"]


@pytest.fixture
def enter(best, photos, tmp_path_factory, monkeypatch):
    """Return a function that enters a new working directory, which has all files that the lines name."""

    def new():
        place = tmp_path_factory.mktemp("place")
        monkeypatch.chdir(place)
        for name in ("best", "other"):
            shutil.copy(best, f"{name}.ckpt")
        shutil.copytree(photos, "photos")
        # `calibrate` needs a wrong label: without mistakes no temperature is best.
        Path("photos/val/cat/0.jpg").rename("photos/val/dog/cat.jpg")
        return place

    return new


def changed(line, chance):
    """Return the line with one to three changes."""
    line = list(line)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(1, len(line) + 1)
        match chance.randrange(7):
            case 0:
                line[at:] = line[at + 1 :]
            case 1:
                line.insert(at, chance.choice(VALUES))
            case 2:
                line[at - (at == len(line))] = chance.choice(VALUES)
            case 3:
                line[at:at] = [chance.choice(OPTIONS), chance.choice(VALUES)]
            case 4:
                line[at:at] = [f"{chance.choice(OPTIONS)}={chance.choice(VALUES)}"]
            case 5:
                options = [number for number, part in enumerate(line) if part.startswith("--") and len(part) > 4]
                if options:
                    number, letter = chance.choice(options), chance.randrange(3, 5)
                    line[number] = line[number][:letter] + line[number][letter + 1 :]
            case _:
                options = [number for number, part in enumerate(line) if "=" in part and part.startswith("--")]
                if options:
                    number = chance.choice(options)
                    line[number] = f"{line[number].partition('=')[0]}={chance.choice(VALUES)}"
    # Whatever the changes are, no training takes long.
    return [*line, "--trainer.fast_dev_run=true"] if line[0] == "fit" else line


def run(line, capfd, monkeypatch):
    """Run a line and return its exit status and output; if it hangs, end this process."""
    capfd.readouterr()
    # `--config -` reads the standard input.
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        status = main(line)
    finally:
        faulthandler.cancel_dump_traceback_later()
    out, err = capfd.readouterr()
    return status, out, err


@fuzzed(12)
def test_a_changed_line_works_or_is_refused(enter, capfd, monkeypatch, chance):
    place = enter()
    line = changed(chance.choice(HONEST), chance)
    about = f"relvit {line}"
    note(about)
    before = sorted(place.rglob("*"))
    status, out, err = run(line, capfd, monkeypatch)
    # `check-data` returns 1 for broken files, and `calibrate` if no temperature helps.
    assert status in ((0, 1, 2) if line[0] in ("check-data", "calibrate") else (0, 2)), about
    assert "Traceback" not in out + err, f"{about}\n{err}"
    if status == 2:
        # Lines before the error may show the progress of earlier steps.
        message = err[err.index("error:") :].strip().splitlines()
        assert len(message) <= 2, f"{about}\n{err}"
        assert "Union" not in err, f"{about}\n{err}"
        assert "\x1b[31m" not in err, about
        assert "\u202e" not in err, about
        # A refused line leaves no file, and does not announce a start.
        assert sorted(place.rglob("*")) == before, about
        assert not re.search(r"parameters\), \d+ classes", out), f"{about}\n{out}"


@pytest.mark.parametrize("line", HONEST, ids=lambda line: line[0])
def test_an_honest_line_works(line, enter, capfd, monkeypatch):
    enter()
    status, _, err = run(line, capfd, monkeypatch)
    assert status == 0, f"relvit {line}\n{err}"
