"""Train a universal model with all steps and one whose patches halt, on CIFAR-10; compare accuracy and steps.

    python tools/depth/halting_accuracy.py --images DIR --work WORK     # DIR has train/<class>/*, test/<class>/*

Images, recipe and width are those of `tools/study/study.py`, one thread; the two trainings of a seed differ in halting
alone. Trainings that are done are not repeated; where one was interrupted, its model trains afresh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

STUDY = Path(__file__).parents[1] / "study"
sys.path.append(str(STUDY))

from study import OPTIONS, SHAPE, prepare  # noqa: E402

from relvit.training import Checkpoint, classifier_of  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {"all steps": {}, "halting": {"halting": "act"}}


def train(images: Path, runs: Path, arguments: dict[str, Any], options: Sequence[str]) -> Path:
    """Train a model unless that is done; return the folder of `relvit fit`."""
    if done := sorted(runs.glob("*/summary.json")):
        return done[-1].parent
    path = os.pathsep.join([str(STUDY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "relvit", "fit", *OPTIONS.split(), f"--data.root={images}", f"--runs={runs}"]
    command += ["--model.model=relvit_universal_tiny", f"--model.model_kwargs={json.dumps(SHAPE | arguments)}"]
    subprocess.run([*command, *options], env=environment, check=True)
    return sorted(runs.glob("*/summary.json"))[-1].parent


@torch.inference_mode()
def evaluate(made: Path) -> tuple[float, float]:
    """Compute accuracy and mean steps of the patches over the test images, by the last checkpoint."""
    checkpoint = Checkpoint.read(made / "checkpoints" / "last.ckpt")
    net, data = classifier_of(checkpoint).net.eval(), checkpoint.data_module()
    data.setup("test")
    right = count = steps = 0.0
    for images, labels in data.test_dataloader():
        logits, taken = (net(images), None) if net.halting is None else net.ponder(images)[:2]
        right += float((logits.argmax(1) == labels).sum())
        steps += net.steps * len(labels) if taken is None else float(taken.double().mean(1).sum())
        count += len(labels)
    return right / count, steps / count


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=Path, required=True, help="class folders of CIFAR-10, in train and test")
    add("--work", type=Path, required=True, help="folder for the trainings")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--epochs", type=int, default=5)
    add("--ponder_weight", type=float, default=0.02)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    images = prepare(given.images, given.work)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in given.models}
    for seed, name in itertools.product(given.seeds, given.models):
        own = MODELS[name]
        options = [f"--trainer.max_epochs={given.epochs}", f"--seed_everything={seed}"]
        if own:
            options += [f"--model.ponder_weight={given.ponder_weight}", "--model.ponder_warmup_epochs=1"]
        runs = given.work / f"{name.replace(' ', '_')}_{seed}"
        found[name].append(evaluate(train(images, runs, own, options)))
    print(f"seeds {given.seeds}\n\n| model | test accuracy, % | mean steps |\n|---|---|---|")
    for name, rows in found.items():
        accuracies, steps = zip(*rows, strict=True)
        print(f"| {name} | {mean_and_error(accuracies)} | {statistics.mean(steps):.2f} of {SHAPE['depth']} |")
    if len(found) > 1:
        pairs = [after[0] - before[0] for before, after in zip(*found.values(), strict=True)]
        print(f"| difference by seed | {mean_and_error(pairs)} | |", flush=True)


def mean_and_error(shares: Sequence[float]) -> str:
    """Write the mean of shares in percent, with its standard error where there are several."""
    points = [100 * share for share in shares]
    error = f" ± {statistics.stdev(points) / len(points) ** 0.5:.2f}" if len(points) > 1 else ""
    return f"{statistics.mean(points):.2f}{error}"


if __name__ == "__main__":
    main()
