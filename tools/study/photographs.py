"""Train on photographs: from scratch (AdamW, Muon), with a field that grows, and fine-tunings after `relvit.retrofit`.

    python tools/study/photographs.py --pack build/imagenette.npz --images DIR            # DIR has train/* and val/*
    python tools/study/photographs.py --pack build/imagenette.npz --work build/photographs --seeds 0
    python tools/study/photographs.py --pack build/imagenette.npz --work build/photographs --device cuda --minutes 9
    python tools/study/photographs.py --setting cifar10 --pack build/cifar10.npz --work build/cifar10 --parts tenth
    python tools/study/photographs.py --toy

The first command packs the images into one file of 55 MB, for a machine that does not have the images. The other
commands train all missing runs, the most important runs first. Each epoch ends with a checkpoint below WORK, and the
same command resumes; several of these commands can run side by side, on one GPU as well. A finished run adds a line to
docs/study/photographs/SETTING.jsonl, and tools/study/photograph_tables.py prints tables of these lines.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from photograph_images import Images, load, pack, synthetic
from photograph_models import BASE_SEED, SETTINGS, TOY, Run, Setting, base_of, models_of, parts_of, tunings_of
from photograph_runs import evaluate, train
from study_lines import read

import relvit

LINES = Path(__file__).parents[2] / "docs" / "study" / "photographs"
# Three fine-tunings of one plain model show how much the results of a fine-tuning vary.
TUNING_SEEDS = (0, 1, 2)
ROPE = "rope-mixed-learned-vit-start"
FIELD = ("learned", ROPE, "lookhere")
MUON = ("learned", "kv-2-learned", ROPE, "lookhere")


def runs_of(setting: Setting, seeds: Sequence[int]) -> list[Run]:
    """List all runs, the most important ones first; fine-tunings come with the seed of their plain model."""
    clip, parts = setting.clips[0], parts_of(setting)
    leading = ("learned", f"kv-{clip}-learned", "plain", f"kv-{clip}", f"kv-{clip}-rate-10")
    runs = []
    for seed in seeds:
        runs += [Run("scratch", model, seed, setting.epochs) for model in models_of(setting)]
        runs += [Run("muon", model, seed, setting.epochs) for model in MUON]
        runs += [Run("field", model, seed, setting.epochs) for model in (*FIELD, leading[1])]
    tuned = {name: part for name, part in parts.items() if part.tuned is not None}
    for seed, name, (model, tuning) in itertools.product(TUNING_SEEDS, tuned, tunings_of(setting).items()):
        # At the trained size, a mirrored embedding is the same as the embedding itself.
        if BASE_SEED in seeds and (tuning.reach == "trained" or tuned[name].size != parts["scratch"].size):
            runs.append(Run(name, model, seed, tuned[name].tuned))
    return sorted(runs, key=lambda run: run.model not in leading)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; yield False if another process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def do(setting: Setting, run: Run, images: dict[str, Images], work: Path, stop: float) -> dict[str, Any] | None:
    """Train and test a run; return its line, or None if the time was over or another process trains it or its base."""
    base = base_of(setting)
    with locked(work / run.folder) as ours:
        if not ours:
            return None
        if parts_of(setting)[run.part].tuned is not None:
            with locked(work / base.folder) as free:
                if not free or train(setting, base, images["train"], work, stop) is None:
                    return None
        made = train(setting, run, images["train"], work, stop)
        if made is None:
            return None
        model, minutes = made
        return {
            **run._asdict(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "minutes": round(minutes, 2),
            "rows": evaluate(setting, run, model, images["test"]),
        }


def about(images: dict[str, Images], given: argparse.Namespace) -> dict[str, Any]:
    """Return the entries that all lines of a command share."""
    modules = {"relvit": relvit, "torch": torch, "timm": timm}
    on_gpu = torch.device(given.device).type != "cpu"
    return {
        "setting": name_of(given),
        "images": {split: len(each.labels) for split, each in images.items()},
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {name: module.__version__ for name, module in modules.items()}
        | {"python": platform.python_version()},
        "commit": given.commit,
    }


def name_of(given: argparse.Namespace) -> str:
    """Return the name of the setting, which distinguishes its lines from the lines of other settings."""
    return "toy" if given.toy else given.setting + ("-choice" if given.choose else "")


def images_for(given: argparse.Namespace) -> dict[str, Images]:
    """Read the images onto the device; with `--choose` every tenth training image becomes a test image instead."""
    if given.toy:
        images = {split: synthetic(count, 24, count) for split, count in (("train", 40), ("test", 20))}
    else:
        images = load(given.pack, given.threads)
    if given.choose:
        held = torch.arange(len(images["train"].labels)) % 10 == 5
        images = {
            "train": images["train"].take((~held).nonzero()[:, 0]),
            "test": images["train"].take(held.nonzero()[:, 0]),
        }
    return {split: each.to(torch.device(given.device)) for split, each in images.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack the images of `--images`; with `--work` or `--toy` train and test the runs that have no line of results."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--setting", choices=SETTINGS, default="imagenette", help="the images, and the shape of the models")
    add("--images", type=Path, help="class folders, to be packed")
    add("--pack", type=Path, help="file of all images, made of --images")
    add("--work", type=Path, help="folder for the trainings")
    add("--parts", nargs="+", choices=parts_of(TOY), help="kinds of training; default: all")
    add("--models", nargs="+", help="models and changes of the plain model; default: all")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--epochs", type=int, help="epochs from scratch; default: those of the setting")
    add("--minutes", type=float, default=math.inf, help="begin no epoch after this time")
    add("--device", default="cpu")
    add("--threads", type=int, default=1)
    add("--lines", type=Path, help="folder for the lines; default: docs/study/photographs")
    add("--commit", default="", help="what is run, where the code is a copy without git")
    add("--choose", action="store_true", help="test on a tenth of the training images, which is left out of training")
    add("--toy", action="store_true", help="random images and tiny models: tries all runs on a CPU in a minute")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    setting = TOY if given.toy else SETTINGS[given.setting]
    setting = setting._replace(epochs=given.epochs or setting.epochs)
    names = [*models_of(setting), *tunings_of(setting)]
    if unknown := [name for name in given.models or () if name not in names]:
        parser.error(f"--models: there is no {' '.join(unknown)} in {', '.join(names)}")
    if not given.toy and given.pack is None:
        parser.error("give --pack, the file of the images, or --toy")
    if given.images:
        pack(given.images, given.pack, setting.packed)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) if given.toy else given.work
        if work is None:
            return
        if given.choose:
            # Checkpoints in WORK itself have seen the images that are now left out.
            work = work / "choice"
        lines = (given.lines or (work if given.toy else LINES)) / f"{name_of(given)}.jsonl"
        images = images_for(given)
        shared = about(images, given)
        runs = [
            run
            for run in runs_of(setting, given.seeds)
            if (not given.parts or run.part in given.parts) and (not given.models or run.model in given.models)
        ]
        progress = True
        # The loop repeats, because another process may stop before it has trained a run or the plain model of a run.
        while progress:
            progress = False
            for run in runs:
                if run in done(lines) or time.monotonic() > begin + 60 * given.minutes:
                    continue
                if line := do(setting, run, images, work, begin + 60 * given.minutes):
                    lines.parent.mkdir(parents=True, exist_ok=True)
                    with open(lines, "a") as file:
                        file.write(json.dumps(shared | line) + "\n")
                    progress = True


def done(lines: Path) -> set[Run]:
    """Read which runs have a line."""
    return {Run(*(line[name] for name in Run._fields)) for line in read(lines.parent) if line["setting"] == lines.stem}


if __name__ == "__main__":
    main()
