"""Functions for tests of the command line: a short training, checkpoints, written files and printed text."""

import csv
import json
import re
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from photos import TINY
from PIL import Image

from relvit.app.cli import main

SAVEFIG = Figure.savefig
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


def without_figures():
    """Within a `with` block, write a blank picture instead of each figure."""
    return patch.object(Figure, "savefig", lambda self, path, **_: Image.new("RGB", (2, 2)).save(path, "PNG"))


def drawn_figures():
    """Within a `with` block, draw the figures even if `without_figures` is in force outside it."""
    return patch.object(Figure, "savefig", SAVEFIG)


def fit(root, runs, *options):
    """Train the tiny model on class folders, by default for an epoch; return the run's folder."""
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={root}", f"--runs={runs}", *TINY]
    assert main([*arguments, "--trainer.max_epochs=1", *options]) == 0
    return only(runs)


def evaluate(command, checkpoint, runs, *options):
    """Run `test` or `predict` on a checkpoint; return the folder of the results."""
    assert main([command, *map(str, (checkpoint, *options)), f"--runs={runs}", *QUIET]) == 0
    return only(runs)


def write_checkpoint_like(path, target, model, model_kwargs, **data):
    """Write a checkpoint like `path` to `target`, with another model with random weights, and with changed data."""
    # `tests/conftest.py` imports this file, and importing Lightning takes seconds, so import it only here.
    from relvit.app.training import ImageClassifier
    from relvit.app.training.checkpoints.file import AVERAGE_KEY

    content = torch.load(path, weights_only=True)
    content.pop(AVERAGE_KEY, None)
    size = {"img_size": data["img_size"]} if "img_size" in data else {}
    content["relvit"]["model"] |= {"model": model, "model_kwargs": model_kwargs, **size}
    content["relvit"]["data"]["init_args"] |= data
    torch.manual_seed(1)
    content["state_dict"] = ImageClassifier(**content["relvit"]["model"]).state_dict()
    torch.save(content, target)
    return target


def first_block(path):
    """Return the content of a checkpoint of two blocks, without the second, because an export of two takes longer."""
    content = torch.load(path)
    content["relvit"]["model"]["model_kwargs"]["depth"] = 1
    content["state_dict"] = {name: each for name, each in content["state_dict"].items() if ".blocks.1." not in name}
    return content


def only(folder):
    """Return the only file or folder in a folder."""
    (found,) = folder.iterdir()
    return found


def rows(path):
    """Return the rows of a CSV file as dictionaries."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def summary(folder):
    """Return the content of a run's summary.json."""
    return json.loads((folder / "summary.json").read_text())


def printed(name, text):
    """Return a number in the table that the Trainer prints."""
    return float(re.search(rf"{name}\W+([\d.]+)", text)[1])


def by_hand(classifier, dataset):
    """Compute accuracy and mean cross-entropy, image by image."""
    right, losses = [], []
    for image, label in dataset:
        logits = classifier(image[None])[0].detach()
        right.append(int(logits.argmax()) == label)
        losses.append(float(-logits.log_softmax(0)[label]))
    return sum(right) / len(right), sum(losses) / len(losses)
