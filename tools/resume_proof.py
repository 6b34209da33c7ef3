"""Interrupt trainings, resume them, and compare with an uninterrupted one bit by bit.

    python tools/resume_proof.py              # all 78 kinds of interruption, a table; exit status 1 if any differs
    python tools/resume_proof.py --only mid-epoch SIGKILL

The tool sends real signals to real processes, in all combinations of {mid-epoch, epoch end, inside validation} x {EMA
on, off} x {accumulation 1, 2} x {SIGTERM, SIGKILL, exception}; in all combinations of place and signal for trainings at
several sizes, on native shapes, and of a model whose patches halt; and with each signal for a reversible model and for
images with several labels. Each training shuffles, augments, mixes (except on native shapes) and drops at random, with
two loader workers. Weights, averaged weights, optimiser, schedule, the table of metrics, the TensorBoard log and the
best checkpoint are compared. The interrupted training must end by the signal, and the resumed one must do fewer steps.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback
from PIL import Image

PLACES = ("mid-epoch", "epoch end", "validation")
ENDS = ("SIGTERM", "SIGKILL", "exception")
# Further options of the data and the model, by the name of the kind of training.
DATA = {
    "": [],
    "random sizes": ["--data.train_sizes=[16,24,32]"],
    "native shapes": ["--data.native=true", "--data.patch_size=8", "--model.mixup=0", "--model.cutmix=0"],
    "progressive sizes": ["--data.train_sizes=[16,24,32]", "--data.size_schedule=progressive"],
    "reversible": ["--model.model=test_relvit_rev"],
    "several labels": [
        *("--data=ImageListData", "--data.train={images}/train.csv", "--data.val={images}/val.csv"),
        *("--data.label_separator=;", "--model.loss=asl"),
    ],
    "halting": ["--model.model=test_relvit_universal", "--model.model_kwargs.halting=act", "--model.ponder_weight=0.1"],
}
# Trainings with these options are interrupted only in the middle of an epoch.
ONE_PLACE = ("reversible", "several labels")
# Each case has the place, whether EMA is on, the number of accumulated batches, the signal, and the options of the
# data.
CASES = [
    *itertools.product(PLACES, (True, False), (1, 2), ENDS, [""]),
    *itertools.product(PLACES, [True], [2], ENDS, [name for name in DATA if name not in ("", *ONE_PLACE)]),
    *itertools.product(["mid-epoch"], [True], [2], ENDS, ONE_PLACE),
]
# Environment variables that say where and how a training ends, and which file counts its steps.
PLACE, END, COUNT = "RESUME_PROOF_PLACE", "RESUME_PROOF_END", "RESUME_PROOF_COUNT"
EXIT_STATUS = {"SIGTERM": 128 + signal.SIGTERM, "SIGKILL": -signal.SIGKILL, "exception": 1}
EPOCHS, BATCHES = 3, 7  # These are the batches of an epoch at one size.
CONFIGURATION = f"""
--data=ImageFolderData --data.img_size=16 --data.batch_size=4 --data.num_workers=2 --data.augment=resized-crop
--data.random_erasing=0.5 --model.model=test_relvit --model.model_kwargs.patch_size=8 --model.model_kwargs.depth=3
--model.model_kwargs.drop_rate=0.1 --model.model_kwargs.drop_path_rate=0.1 --model.mixup=0.8 --model.cutmix=1
--model.warmup_epochs=1 --trainer.max_epochs={EPOCHS} --trainer.accelerator=cpu --trainer.enable_progress_bar=false
--trainer.num_sanity_val_steps=0 --seed_everything=3 --save_every=2
"""


class Interrupt(Callback):
    """Counts steps, and ends the process in the second epoch by the environment variables."""

    def __init__(self) -> None:
        self.place, self.end, self.count = (os.environ.get(name, "") for name in (PLACE, END, COUNT))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with open(self.count, "a") as file:
            file.write(".")
        # Batch 5 is between two batches that are accumulated.
        self._end_at("mid-epoch", (trainer.current_epoch, batch_idx) == (1, 5))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_at("epoch end", trainer.current_epoch == 1)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._end_at("validation", (trainer.current_epoch, batch_idx) == (1, 1))

    def _end_at(self, place: str, here: bool) -> None:
        if place != self.place or not here:
            return
        if self.end == "exception":
            raise RuntimeError("as asked for")
        os.kill(os.getpid(), getattr(signal, self.end))


def make_images(root: Path) -> Path:
    """Write class folders of random images, 28 to train and 10 to validate, and lists with several labels of them."""
    random = np.random.default_rng(0)
    for split, count in (("train", 14), ("val", 5)):
        rows = ["path,label"]
        for name in ("ant", "bee"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(random.integers(0, 256, (20, 24, 3), np.uint8)).save(folder / f"{i}.png")
                rows.append(f"{split}/{name}/{i}.png,{('ant;bee', name, '')[i % 3]}")
        (root / f"{split}.csv").write_text("\n".join(rows))
    return root


def run(arguments: list[str], **environment: str) -> int:
    """Run `relvit` in a new process and return the exit status."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["relvit.app.cli.fit.fit", "torch.utils.tensorboard", "tensorboard.backend"])
    process = context.Process(target=_relvit, args=(arguments, environment))
    process.start()
    process.join()
    return process.exitcode


def _relvit(arguments: list[str], environment: Mapping[str, str]) -> None:
    from relvit.app.cli import main

    os.environ.update(environment)
    torch.set_num_threads(1)
    # With another start method, the loader's workers would come from a fork server and import all modules again.
    multiprocessing.set_start_method("fork", force=True)
    sys.path.insert(0, str(Path(__file__).parent))
    with (
        open(environment[COUNT] + ".log", "a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        sys.exit(main(arguments))


def train(
    images: Path, folder: Path, ema: bool, accumulate: int, data: str = "", place: str = "", end: str = ""
) -> tuple[Path, int]:
    """Train; return the run's folder and the exit status."""
    arguments = ["fit", *CONFIGURATION.split(), f"--data.root={images}", f"--runs={folder}"]
    arguments += ["--trainer.callbacks=resume_proof.Interrupt", f"--trainer.accumulate_grad_batches={accumulate}"]
    arguments += ["--model.ema_decay=0.9"] * ema + [option.format(images=images) for option in DATA[data]]
    status = run(arguments, **{PLACE: place, END: end, COUNT: str(folder) + ".steps"})
    (made,) = folder.iterdir()
    return made, status


def differences(whole: Path, resumed: Path) -> list[str]:
    """List what differs between two runs' checkpoints and logs."""
    found = []
    for name in ("last.ckpt", "best.ckpt"):
        a, b = (torch.load(made / "checkpoints" / name, weights_only=True) for made in (whole, resumed))
        for key in ("state_dict", "ema_state_dict", "optimizer_states", "lr_schedulers", "global_step", "position"):
            if not _equal(a.get(key), b.get(key)):
                found.append(f"{name}: {key}")
        if a["relvit"].get("thresholds") != b["relvit"].get("thresholds"):
            found.append(f"{name}: thresholds")
    if _table(whole) != _table(resumed):
        found.append("metrics.csv")
    if _scalars(whole) != _scalars(resumed):
        found.append("tensorboard")
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _table(made: Path) -> list[dict[str, str]]:
    """Read the rows of metrics.csv without times and memory (`system/`), which differ in any two runs."""
    with open(made / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if not name.startswith("system/")} for row in rows]


def _scalars(made: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(made / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("system/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def try_out(
    folder: Path, images: Path, whole: Path, case: tuple[str, bool, int, str, str]
) -> tuple[list[str], int, int]:
    """Interrupt and resume a training; return the differences, and the numbers of steps before and after."""
    place, ema, accumulate, end, data = case
    made, status = train(images, folder, ema, accumulate, data, place, end)
    wrong = [] if status == EXIT_STATUS[end] else [f"ended with {status} instead of {EXIT_STATUS[end]}"]
    if (status := run(["fit", f"--resume={made}"], **{PLACE: "", END: "", COUNT: f"{folder}.steps2"})) != 0:
        return [*wrong, f"resuming ended with {status}, see {folder}.steps2.log"], 0, 0
    first, second = (os.path.getsize(f"{folder}.{name}") for name in ("steps", "steps2"))
    if not second < steps_of(whole):
        wrong.append(f"{second} steps after resuming: all steps once more")
    return wrong + differences(whole, made), first, second


def steps_of(whole: Path) -> int:
    """Return the batches of an uninterrupted training."""
    return os.path.getsize(f"{whole.parent}.steps")


def main(arguments: list[str] | None = None) -> int:
    """Try all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="places, ends and options of the data to try")
    only = parser.parse_args(arguments).only
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        images, wholes = make_images(root / "images"), {}
        print("| place | EMA | accumulation | end | data | batches before + after | of | outcome |\n|" + "---|" * 8)
        for number, case in enumerate(CASES):
            place, ema, accumulate, end, data = case
            chosen = ((PLACES, place), (ENDS, end), (DATA, data))
            if any(set(names) & set(only) and name not in only for names, name in chosen):
                continue
            kind = ema, accumulate, data
            if kind not in wholes:
                wholes[kind], status = train(images, root / f"whole{len(wholes)}", *kind)
                assert status == 0
            whole = wholes[kind]
            wrong, first, second = try_out(root / f"case{number}", images, whole, case)
            failed += bool(wrong)
            outcome = "; ".join(wrong) or "bit-equal"
            cells = (place, "on" if ema else "off", accumulate, end, data, f"{first} + {second}", steps_of(whole))
            print("| " + " | ".join(map(str, (*cells, outcome))) + " |", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
