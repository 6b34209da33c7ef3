"""One training and the commands after it: all give the numbers of a plain loop of timm and PyTorch over the images."""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
from command_line import fit, only, rows, summary
from photos import CLASSES, write_photos
from PIL import Image
from sklearn.metrics import confusion_matrix, f1_score, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

import relvit
from relvit.app.cli import main

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
# The names of folders have characters that patterns, options and lists could misread.
ROOT, RUNS = "photos [0], é=1", "runs=[1] of a day"


class Chain(NamedTuple):
    """A calibrated checkpoint, the folder of its images, and what the plain loop computes for the test images."""

    calibrated: Path
    root: Path
    model: torch.nn.Module
    temperature: float
    names: list[str]
    paths: list[str]
    labels: list[int]
    logits: torch.Tensor

    @property
    def probabilities(self):
        return (self.logits.double() / self.temperature).softmax(1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Train, rename the run's folder, calibrate and publish; then load the model by timm, and loop over the images."""
    place = tmp_path_factory.mktemp("chain")
    root = write_photos(place / ROOT)
    for number, path in enumerate(sorted(root.glob("*/*/*.jpg"))):
        # Every third image is grey, and every second file has another format and an ending in upper case.
        image = Image.open(path).convert("L" if number % 3 == 0 else "RGB")
        path.unlink()
        image.save(path.with_suffix(".PNG" if number % 2 else ".jpeg"))
    # `calibrate` refuses a model that classifies all val images rightly, so one cat is among the dogs.
    shutil.move(root / "val" / "cat" / "0.jpeg", root / "val" / "dog" / "cat.jpeg")
    options = ["--data.img_size=[16,32]", "--data.crop_pct=0.8", "--model.ema_decay=0.5", "--model.lr=1e-3"]
    run = fit(root, place / RUNS, *options, "--trainer.max_epochs=2", "--model.warmup_epochs=0")
    moved = place / "moved = [run]"
    shutil.move(run, moved)
    best, calibrated = moved / "checkpoints" / "best.ckpt", moved / "checkpoints" / "best_calibrated.ckpt"
    assert main(["calibrate", str(best), "--device=cpu"]) == 0
    assert main(["publish", str(calibrated), f"--to={place / 'published'}"]) == 0

    model = timm.create_model(f"local-dir:{place / 'published'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    paths = sorted(str(path) for path in (root / "test").rglob("*.*"))
    with torch.no_grad():
        logits = torch.cat([model(transform(Image.open(path).convert("RGB"))[None]) for path in paths])
    temperature = json.loads((place / "published" / "config.json").read_text())["relvit"]["temperature"]
    names = list(model.pretrained_cfg["label_names"])
    labels = [names.index(Path(path).parent.name) for path in paths]
    return Chain(calibrated, root, model, temperature, names, paths, labels, logits)


def run_command(command, checkpoint, folder, *options):
    assert main([command, str(checkpoint), f"--runs={folder}", *options, *QUIET]) == 0
    return only(folder)


def close(value):
    return pytest.approx(value, abs=2e-5)


def test_the_classes_are_those_of_the_folders(chain):
    assert chain.names == list(CLASSES) == relvit.load(chain.calibrated).class_names
    assert chain.temperature == pytest.approx(relvit.load(chain.calibrated).classifier.temperature)
    assert chain.temperature != 1


def test_test_reports_the_metrics_of_the_loop(chain, tmp_path):
    folder = run_command("test", chain.calibrated, tmp_path / "runs")
    found, probabilities, labels = summary(folder), chain.probabilities, torch.tensor(chain.labels)
    predicted = probabilities.argmax(1)
    assert found["images"] == len(chain.paths) == 18
    assert found["test/acc1"] == close(float((predicted == labels).float().mean()))
    assert found["test/loss"] == close(log_loss(labels, probabilities))
    assert found["test/f1"] == close(f1_score(labels, predicted, average="macro", zero_division=0))
    error = multiclass_calibration_error(probabilities, labels, len(chain.names), n_bins=15)
    assert found["test/calibration_error"] == close(float(error))
    counts = [[int(row[name]) for name in chain.names] for row in rows(folder / "confusion.csv")]
    assert counts == confusion_matrix(labels, predicted).tolist()
    wrong = {path for path, right in zip(chain.paths, predicted == labels, strict=True) if not right}
    assert {os.path.abspath(row["path"]) for row in rows(folder / "mistakes.csv")} == wrong


def test_predict_has_a_row_for_each_image_with_the_probabilities_of_the_loop(chain, tmp_path):
    found = rows(run_command("predict", chain.calibrated, tmp_path / "runs") / "predictions.csv")
    best, classes = chain.probabilities.max(1)
    assert [os.path.abspath(row["path"]) for row in found] == chain.paths
    assert [row["class"] for row in found] == [chain.names[index] for index in classes]
    assert [float(row["probability"]) for row in found] == close(best.tolist())
    # The accuracy that `test` prints can be computed from this table.
    right = [row["class"] == Path(row["path"]).parent.name for row in found]
    assert np.mean(right) == np.mean(classes.numpy() == chain.labels)


@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loaded_model_gives_the_same_probabilities(exported, chain, tmp_path):
    source = chain.calibrated
    if exported:
        source = tmp_path / "model.pt2"
        assert main(["export", str(chain.calibrated), f"--output={source}"]) == 0
    found = relvit.load(source).predict(str(chain.root / "test"), top=3)
    assert [each.path for each in found] == chain.paths
    values = [dict(zip(each.names, each.probabilities, strict=True)) for each in found]
    given = torch.tensor([[row[name] for name in chain.names] for row in values])
    torch.testing.assert_close(given, chain.probabilities.float(), atol=2e-5, rtol=0)


def test_embed_writes_what_the_last_layer_turns_into_these_logits(chain, tmp_path):
    output = tmp_path / "features.npz"
    assert main(["embed", str(chain.calibrated), str(chain.root / "test"), f"--output={output}", "--device=cpu"]) == 0
    found = np.load(output)
    assert found["path"].tolist() == chain.paths
    assert found["class"].tolist() == [chain.names[label] for label in chain.labels]
    logits = chain.model.get_classifier()(torch.from_numpy(found["features"])).detach()
    torch.testing.assert_close(logits, chain.logits, atol=1e-5, rtol=0)


def test_resolutions_reports_the_metrics_of_the_loop_at_the_size_of_the_training(chain, tmp_path):
    output = tmp_path / "sizes.json"
    command = ["resolutions", str(chain.calibrated), "--sizes=[[16,32]]", "--split=test", f"--output={output}"]
    assert main([*command, "--accelerator=cpu"]) == 0
    (found,) = json.loads(output.read_text())
    assert found["images"] == len(chain.paths)
    assert found["acc1"] == close(np.mean(chain.probabilities.argmax(1).numpy() == chain.labels))
    assert found["loss"] == close(log_loss(chain.labels, chain.probabilities))
