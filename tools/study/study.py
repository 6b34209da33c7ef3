"""Train the declared models on CIFAR-10 with several seeds; evaluate them at sizes they were not trained at.

    python tools/study/study.py --images DIR --work WORK    # all missing runs; DIR has train/<class>/*, test/<class>/*
    python tools/study/study.py --images DIR --work WORK --models learned kv-3 --recipes one --seeds 0 1 2
    python tools/study/study.py --images DIR --work WORK --precision bf16-mixed --accelerator gpu

Every run is a `relvit fit` on one thread in a folder of its own below WORK. The same command resumes an interrupted
run, and several of these commands can run side by side. A finished run adds one line to docs/study/runs/RECIPE.jsonl;
tools/study/study_report.py makes tables and figures from all files in that folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import timm
import torch
from lightning import Callback
from lightning.fabric import Fabric
from photograph_models import RELPOS_AS_VIT
from study_lines import PROTOCOLS, read

import relvit
from relvit.app.evaluation.evaluate_sizes import evaluate_size
from relvit.app.training import Checkpoint, classifier_of
from relvit.models import set_reach

LINES = Path(__file__).parents[2] / "docs" / "study" / "runs"

SHAPE = {"patch_size": 4, "embed_dim": 128, "depth": 4, "num_heads": 4}
TIMM = SHAPE | {"class_token": False, "global_pool": "avg"}
VIT = TIMM | {"dynamic_img_size": True}
ROPE = VIT | {"use_abs_pos_emb": False}
PATCH_2 = {"patch_size": 2}
REACH = ("stretch", "logn")


class Model(NamedTuple):
    """Name and arguments of a model of timm's registry, and values of `--reach` to evaluate beside 'trained'."""

    name: str
    arguments: dict[str, Any]
    reach: tuple[str, ...] = ()


def relative(reach: tuple[str, ...] = (), **arguments: Any) -> Model:
    """Declare a relvit model; its tables start at 0.02 unless given, the default before the study."""
    learned = {} if "position" in arguments or not arguments.get("rel_terms", "kv") else {"rel_init_std": 0.02}
    return Model("relvit_tiny", SHAPE | learned | arguments, reach)


MODELS = {
    "none": Model("vit_tiny_patch16_224", VIT | {"pos_embed": "none"}),
    "learned": Model("vit_tiny_patch16_224", VIT | {"pos_embed": "learn"}),
    "axial": relative(rel_terms="", pos_embed="axial"),
    # This model starts with a LayerScale of 1e-6, because `timm.create_model` ignores arguments that are None. timm's
    # rotary models below start with one of 1e-5 and a head near zero. Either may slow a short training. The models
    # "-vit-start" start as the plain ViT does.
    "relpos": Model("vit_relpos_small_patch16_224", TIMM | {"rel_pos_type": "bias", "init_values": None}),
    "relpos-vit-start": Model("vit_relpos_small_patch16_224", TIMM | RELPOS_AS_VIT),
    "rope-axial": Model("vit_small_patch16_rope_224", ROPE),
    "rope-mixed": Model("vit_small_patch16_rope_mixed_224", ROPE),
    "rope-axial-augmented": Model(
        "vit_small_patch16_rope_224",
        ROPE | {"rope_shift_coords": 0.5, "rope_jitter_coords": 1.1, "rope_rescale_coords": 2.0},
    ),
    "slopes": relative(position="slopes"),
    "kv-7": relative(REACH),
    "kv-1": relative(max_distance=1),
    "kv-2": relative(max_distance=2),
    "kv-3": relative(REACH, max_distance=3),
    # The tables start with larger values; this start has become relvit's default since then.
    "kv-3-start-0.1": relative(("stretch",), max_distance=3, rel_init_std=0.1),
    "kv-1-start-0.1": relative(("stretch",), max_distance=1, rel_init_std=0.1),
    "kv-2-start-0.1": relative(("stretch",), max_distance=2, rel_init_std=0.1),
    "kv-7-start-0.1": relative(("stretch",), rel_init_std=0.1),
    "b-7-start-0.1": relative(rel_terms="b", rel_init_std=0.1),
    "k-7-start-0.1": relative(rel_terms="k", rel_init_std=0.1),
    "v-2-start-0.1": relative(max_distance=2, rel_terms="v", rel_init_std=0.1),
    "kvb-7-start-0.1": relative(rel_terms="kvb", rel_init_std=0.1),
    "kv-2-piecewise-start-0.1": relative(max_distance=2, bucketing="piecewise", rel_init_std=0.1),
    "kv-2-learned-start-0.1": relative(
        ("mirror", "stretch-mirror"), max_distance=2, pos_embed="learn", rel_init_std=0.1
    ),
    "v-2-learned-start-0.1": relative(max_distance=2, rel_terms="v", pos_embed="learn", rel_init_std=0.1),
    # Other methods beside the same learned embedding, which timm's model names call "ape".
    "rope-mixed-learned": Model("vit_small_patch16_rope_mixed_ape_224", VIT),
    "rope-mixed-learned-vit-start": relative(rope="mixed", rel_terms="", pos_embed="learn"),
    "kv-2-rope-mixed-learned": relative(max_distance=2, rope="mixed", pos_embed="learn", rel_init_std=0.1),
    "v-2-rope-mixed-learned": relative(
        max_distance=2, rope="mixed", rel_terms="v", pos_embed="learn", rel_init_std=0.1
    ),
    "rope-axial-learned": Model("vit_small_patch16_rope_ape_224", VIT),
    # The four heads are directed and see 180 degrees each; no head sees all patches.
    "lookhere-180": relative(position="lookhere"),
    # This model has a narrower MLP, since its attention has more parameters.
    "pape": relative(position="pape", mlp_ratio=2.5),
    "pape-learned": relative(position="pape", pos_embed="learn", mlp_ratio=2.45),
    "fire": relative(position="fire"),
    "fire-learned": relative(position="fire", pos_embed="learn"),
    # This model has a slightly wider MLP, since its attention has fewer parameters.
    "aft-conv": Model("relvit_aft_conv_tiny", SHAPE | {"mlp_ratio": 4.5}),
    # With patches of 2 px the grid has 16 x 16 patches instead of 8 x 8.
    "learned-patch-2": Model("vit_tiny_patch16_224", VIT | {"pos_embed": "learn"} | PATCH_2),
    "kv-2-learned-patch-2": relative(max_distance=2, pos_embed="learn", rel_init_std=0.1, **PATCH_2),
    "kv-4-learned-patch-2": relative(max_distance=4, pos_embed="learn", rel_init_std=0.1, **PATCH_2),
    "kv-7-learned-patch-2": relative(max_distance=7, pos_embed="learn", rel_init_std=0.1, **PATCH_2),
}


class Recipe(NamedTuple):
    """Epochs, images and options of `relvit fit`; a split has a range of the images of each class."""

    epochs: int
    images: dict[str, tuple[str, int, int]]
    options: tuple[str, ...] = ()


# These tables map each split to its source folder and to a range of the images of each class, in the order of file
# names. Validation images are in no other split.
PART = {"train": ("train", 0, 2000), "val": ("train", 2000, 2020), "test": ("test", 0, 400)}
WHOLE = {"train": ("train", 0, 5000), "val": ("test", 980, 1000), "test": ("test", 0, 980)}
SEVERAL = ("--data.train_sizes=[20,24,28,32,36,40,44]",)
RECIPES = {
    "one": Recipe(8, PART),
    "muon": Recipe(8, PART, ("--model.opt=muon", "--model.lr=2e-3")),
    "several": Recipe(8, PART, SEVERAL),
    "long": Recipe(25, WHOLE),
    "long-several": Recipe(25, WHOLE, SEVERAL),
}
# timm builds these models for one size. Copies are evaluated at other sizes, but not trained at several.
ONE_SIZE = ("relpos", "relpos-vit-start")
SIZE = 32
OPTIONS = f"""
--data=ImageFolderData --data.img_size={SIZE} --data.batch_size=128 --data.num_workers=0 --data.cache=true
--data.augment=crop-flip --data.crop_pct=1 --data.mean=[0.4914,0.4822,0.4465] --data.std=[0.247,0.2435,0.2616]
--model.lr=1e-3 --model.weight_decay=0.05 --model.warmup_epochs=1 --model.label_smoothing=0
--trainer.gradient_clip_val=1 --trainer.devices=1 --trainer.enable_progress_bar=false
--trainer.callbacks=study.ProcessorTime --quiet
"""
SIZES = (16, 24, 32, 40, 48, 64)
REACH_SIZES = (16, 48, 64)
# A CPU without bfloat16 instructions needs ten times as long with bf16-mixed as with 32-true.
PRECISIONS = ("32-true", "bf16-mixed")
ACCELERATORS = ("cpu", "gpu")


class Run(NamedTuple):
    """One training."""

    model: str
    recipe: str
    seed: int
    precision: str
    accelerator: str

    @property
    def folder(self) -> str:
        return "_".join(map(str, self))


class ProcessorTime(Callback):
    """Add up the seconds of processor time of a training in a file, up to the last checkpoint."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = time.process_time()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        file, now = Path(trainer.default_root_dir) / "processor_seconds", time.process_time()
        before = float(file.read_text()) if file.exists() else 0.0
        file.write_text(f"{before + now - self.start}\n")
        self.start = now


def prepare(images: Path, root: Path, splits: dict[str, tuple[str, int, int]]) -> Path:
    """Link the images of a recipe below `root`, where all runs of the recipe use them."""
    for split, (source, first, last) in splits.items():
        for folder in sorted((images / source).iterdir()):
            target = root / split / folder.name
            target.mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.iterdir())[first:last]:
                # Another training that was started at the same time may have made this link already.
                with contextlib.suppress(FileExistsError):
                    (target / file.name).symlink_to(file.resolve())
    return root


def options(run: Run) -> list[str]:
    """Return the options of `relvit fit` that the models of a recipe share."""
    recipe = RECIPES[run.recipe]
    own = (f"--trainer.precision={run.precision}", f"--trainer.accelerator={run.accelerator}")
    return [*OPTIONS.split(), *own, f"--trainer.max_epochs={recipe.epochs}", *recipe.options]


def train(run: Run, images: Path, folder: Path) -> Path:
    """Train, or resume an interrupted training; return the folder of `relvit fit`."""
    model, recipe = MODELS[run.model], RECIPES[run.recipe]
    begun = sorted(folder.glob("*/checkpoints/last.ckpt"))
    if begun:
        made = begun[-1].parent.parent
        if Checkpoint.read(begun[-1]).finished_epochs() >= recipe.epochs:
            return made
        arguments = [f"--resume={made}"]
    else:
        arguments = [*options(run), f"--data.root={images}", f"--seed_everything={run.seed}"]
        arguments += [f"--model.model={model.name}", f"--model.model_kwargs={json.dumps(model.arguments)}"]
        arguments += [f"--runs={folder}"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(folder / "log.txt", "a") as log:
        command = [sys.executable, "-m", "relvit", "fit", *arguments]
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    return sorted(folder.glob("*/checkpoints/last.ckpt"))[-1].parent.parent


def evaluate(run: Run, made: Path) -> list[dict[str, Any]]:
    """Evaluate the last checkpoint at all sizes, in the precision and on the device of the training."""
    checkpoint = Checkpoint.read(made / "checkpoints" / "last.ckpt")
    device = Fabric(accelerator=run.accelerator, devices=1).device
    classifier, data = classifier_of(checkpoint).to(device), checkpoint.data_module()
    rows = []
    for reach in ("trained", *MODELS[run.model].reach):
        if reach != "trained":
            set_reach(classifier.net, reach, SIZE)
        sizes = SIZES if reach == "trained" else REACH_SIZES
        for protocol, size in itertools.product(PROTOCOLS, sizes):
            if size == SIZE and protocol != PROTOCOLS[0]:
                continue  # At this size the results would be the same as those that are recorded already.
            with torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16-mixed"):
                row = evaluate_size(classifier, data, size, "test", protocol)
            values = {name: round(row[name], 5) for name in ("acc1", "loss", "calibration_error")}
            rows.append({"reach": reach, "protocol": protocol, "size": size, **values})
    return rows


def line_of(run: Run, made: Path, commit: str) -> dict[str, Any]:
    """Return the line of a finished run."""
    model, recipe = MODELS[run.model], RECIPES[run.recipe]
    net = timm.create_model(model.name, img_size=SIZE, num_classes=10, **model.arguments)
    seconds = float((made / "processor_seconds").read_text())
    modules = {"relvit": relvit, "torch": torch, "timm": timm, "lightning": lightning}
    return {
        **run._asdict(),
        "name": model.name,
        "arguments": model.arguments,
        "options": options(run),
        "images": {split: 10 * (last - first) for split, (_, first, last) in recipe.images.items() if split != "val"},
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "processor_minutes": round(seconds / 60, 2),
        **({"gpu": torch.cuda.get_device_name()} if run.accelerator == "gpu" else {}),
        "versions": {name: module.__version__ for name, module in modules.items()}
        | {"python": platform.python_version()},
        "commit": commit,
        "rows": evaluate(run, made),
    }


def done(lines: Path) -> set[Run]:
    """Read which runs have a line."""
    return {Run(line["model"], line["recipe"], line["seed"], *how_of(line)) for line in read(lines)}


def how_of(line: dict[str, Any]) -> tuple[str, str]:
    """Return the precision and the accelerator of a line's training."""
    given = dict(option.removeprefix("--trainer.").partition("=")[::2] for option in line["options"])
    return given["precision"], given["accelerator"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate the runs that the options choose, except for runs that have a line of results already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=Path, required=True, help="class folders of CIFAR-10, in train and test")
    add("--work", type=Path, required=True, help="folder for the trainings")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    add("--accelerator", choices=ACCELERATORS, default=ACCELERATORS[0])
    add("--lines", type=Path, default=LINES)
    add("--commit", default="", help="what is run, where the code is a copy without git")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for key in itertools.product(given.models, given.recipes, given.seeds):
        run = Run(*key, given.precision, given.accelerator)
        if run in done(given.lines) or (run.model in ONE_SIZE and RECIPES[run.recipe].options == SEVERAL):
            continue
        folder = given.work / run.folder
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # Another process trains this run.
            splits = RECIPES[run.recipe].images
            images = prepare(given.images, given.work / ("all-images" if splits is WHOLE else "images"), splits)
            line = line_of(run, train(run, images, folder), given.commit)
        given.lines.mkdir(parents=True, exist_ok=True)
        with open(given.lines / f"{run.recipe}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{run.folder}: {line['processor_minutes']} processor minutes", flush=True)


if __name__ == "__main__":
    main()
