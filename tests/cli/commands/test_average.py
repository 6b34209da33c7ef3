"""`relvit average`: what it writes is a checkpoint for every command but for going on with its training."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from photos import CLASSES, TINY

import relvit
from relvit.cli import main
from relvit.data import ImageFolderData

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def averaged(run, tmp_path_factory):
    """The mean of the run's best checkpoint and of one apart from it, and a classifier with their mean."""
    folder = tmp_path_factory.mktemp("average")
    best = run / "checkpoints" / "best.ckpt"
    other = torch.load(best, weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for tensor in other["state_dict"].values():
        tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    torch.save(other, folder / "other.ckpt")
    classifier = relvit.load(best).classifier
    state = classifier.state_dict()
    classifier.load_state_dict({name: (state[name] + other["state_dict"][name]) / 2 for name in state})
    output = folder / "averaged.ckpt"
    assert main(["average", f"--ckpt_paths=[{best},{folder / 'other.ckpt'}]", f"--output={output}"]) == 0
    return output, classifier


def by_hand(classifier, photos, split):
    """Probabilities, float64 (images, classes), labels."""
    data = ImageFolderData(str(photos), img_size=16, num_workers=0).dataset(split)
    logits = torch.stack([classifier(image[None])[0].detach().double() for image, _ in data])
    return logits.softmax(-1).numpy(), np.array([label for _, label in data])


def test_every_other_command_takes_it(averaged, photos, tmp_path, capsys):
    path, classifier = averaged
    probabilities, labels = by_hand(classifier, photos, "val")
    losses = -np.log(probabilities[np.arange(len(labels)), labels])
    assert main(["validate", f"--ckpt_path={path}", *QUIET]) == 0
    assert float(re.search(r"val/loss\W+([\d.]+)", capsys.readouterr().out)[1]) == pytest.approx(
        losses.mean(), rel=1e-4
    )

    probabilities, labels = by_hand(classifier, photos, "test")
    assert main(["test", f"--ckpt_path={path}", f"--runs={tmp_path / 'test'}", *QUIET]) == 0
    (folder,) = (tmp_path / "test").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test/acc1"] == pytest.approx((probabilities.argmax(1) == labels).mean())

    places = [f"--data.root={photos / 'test'}", f"--runs={tmp_path / 'predict'}"]
    assert main(["predict", f"--ckpt_path={path}", *places, *QUIET]) == 0
    (folder,) = (tmp_path / "predict").iterdir()
    with open(folder / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [list(CLASSES)[i] for i in probabilities.argmax(1)]
    assert [float(row["probability"]) for row in rows] == pytest.approx(probabilities.max(1), abs=2e-6)
    assert [found.probability for found in relvit.load(path).predict(photos / "test")] == pytest.approx(
        probabilities.max(1), rel=1e-5
    )
    assert main(["resolutions", f"--ckpt_path={path}", "--sizes=[16]", "--accelerator=cpu"]) == 0
    assert main(["embed", f"--ckpt_path={path}", f"--root={photos / 'test'}", f"--output={tmp_path / 'e.npz'}"]) == 0


def test_a_training_starts_from_it_but_does_not_go_on(averaged, photos, tmp_path, capsys):
    path, classifier = averaged
    common = [argument for argument in TINY if not argument.startswith("--model.")]
    fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *common]
    still = ["--trainer.max_epochs=1", "--model.lr=0", "--model.min_lr=0"]
    assert main([*fit, *still, f"--model.pretrained={path}"]) == 0
    (folder,) = tmp_path.iterdir()
    found = relvit.load(folder / "checkpoints" / "best.ckpt").classifier.state_dict()
    for name, tensor in classifier.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
    capsys.readouterr()
    assert main([*fit, f"--ckpt_path={path}"]) == 2
    message = capsys.readouterr().err
    assert "averaged.ckpt holds weights alone (an average does), with which no training can go on" in message
    assert f"--model.pretrained {path}" in message
    assert len(message.splitlines()) == 1


def test_what_is_written_is_said_and_nothing_is_overwritten(averaged, run, tmp_path, capsys):
    path, _ = averaged
    best, last = (run / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    before = path.read_bytes()
    assert main(["average", f"--ckpt_paths=[{best},{last}]", f"--output={path}"]) == 2
    assert f"output {path} exists" in capsys.readouterr().err
    assert path.read_bytes() == before
    output = tmp_path / "mean.ckpt"
    assert main(["average", "--ckpt_paths", f"[{best}, {path}]", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert f"{output} holds the mean of 2 checkpoints" in out
    assert main([*out.splitlines()[-1].split()[1:], "--trainer.accelerator=cpu"]) == 0
    assert main(["average", f"--ckpt_paths={best}", f"--output={tmp_path / 'x.ckpt'}"]) == 2
    assert "--ckpt_paths must be a list" in capsys.readouterr().err
    assert main(["average", f"--ckpt_paths=[{best}]"]) == 2
    assert "missing: --output" in capsys.readouterr().err
