"""Distillation through the command line, from a checkpoint: the loss against the paper's formulas in NumPy."""

import numpy as np
import pytest
import torch
import yaml
from command_line import evaluate, fit, summary
from photos import TINY

from relvit.app.data import ImageFolderData
from relvit.app.plots import read_metrics
from relvit.app.training import load_classifier

# The student's normalisation differs from the teacher's, which is ImageNet's.
MEAN, STD = (0.5, 0.4, 0.3), (0.3, 0.2, 0.25)
# With these options a training changes no weights, so the checkpoint has the loss of the epoch.
STILL = ["--model.lr=0", "--model.min_lr=0", "--model.warmup_epochs=0", "--data.augment=none"]


def softmax(logits, temperature=1.0):
    exps = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    return exps / exps.sum(1, keepdims=True)


def logits_of(path, photos, **normalisation):
    """Return float64 logits (images, classes) of the training images, and the labels."""
    classifier = load_classifier(path)
    data = ImageFolderData(str(photos), img_size=16, num_workers=0, augment="none", **normalisation).dataset("train")
    images = torch.stack([image for image, _ in data])
    with torch.no_grad():
        return classifier(images).double().numpy(), np.array([label for _, label in data])


@pytest.mark.parametrize(
    ("flags", "weight", "temperature"),
    [
        ([], 0.5, None),
        # `tests/app/training/optim/test_distillation.py`, which is not slow, compares both losses.
        pytest.param(["--model.distill=soft", "--model.distill_weight=0.1"], 0.1, 3.0, marks=pytest.mark.slow),
    ],
)
def test_a_student_learns_from_the_labels_and_the_teacher(flags, weight, temperature, best, photos, tmp_path):
    teacher = tmp_path / "teacher.ckpt"
    content = torch.load(best, weights_only=True)
    # The teacher recognises the images, but names another class for each, so that labels and teacher never agree.
    for name in ("net.head.weight", "net.head.bias"):
        content["state_dict"][name] = content["state_dict"][name].roll(1, 0)
    torch.save(content, teacher)
    options = [f"--data.mean={list(MEAN)}", f"--data.std={list(STD)}", "--model.model_kwargs.depth=1", *STILL]
    folder = fit(photos, tmp_path / "runs", *options, f"--model.teacher={teacher}", *flags)
    best = folder / "checkpoints" / "best.ckpt"
    theirs, labels = logits_of(teacher, photos)
    teacher.unlink()
    ours, _ = logits_of(best, photos, mean=MEAN, std=STD)
    targets = 0.9 * np.eye(3)[labels] + 0.1 / 3
    loss = -(targets * np.log(softmax(ours))).sum(1)
    if temperature is None:
        distance = -np.log(softmax(ours)[np.arange(len(labels)), theirs.argmax(1)])
    else:
        p, q = softmax(theirs, temperature), softmax(ours, temperature)
        distance = temperature**2 * (p * np.log(p / q)).sum(1)
    ((_, found),) = read_metrics(folder / "metrics.csv")["train/loss"]
    assert found == pytest.approx(np.mean((1 - weight) * loss + weight * distance), rel=1e-4)
    assert found != pytest.approx(loss.mean(), rel=1e-2)

    # The run stores only the name of the teacher, and works without the teacher.
    content = torch.load(best, weights_only=True)
    assert content["relvit"]["model"]["teacher"] == str(teacher)
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["teacher"] == str(teacher)
    assert set(content["state_dict"]) == set(load_classifier(best).state_dict())
    assert summary(evaluate("test", best, tmp_path / "test"))["test/acc1"] == summary(folder)["test/acc1"]


def test_mistakes(best, photos, tmp_path, fails):
    runs = tmp_path / "runs"
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", *TINY]
    content = torch.load(best, weights_only=True)
    content["relvit"]["model"]["class_names"] = ["cat", "dog", "yak"]
    torch.save(content, tmp_path / "yak.ckpt")
    for flags, message in (
        ([f"--model.teacher={best}x"], f"no weights at {best}x (did you mean '{best}'?)"),
        ([f"--model.teacher={best}", "--model.distill=softly"], "--model.distill must be one of"),
        (["--model.distill=soft"], "distill soft has no effect without teacher"),
        ([f"--model.teacher={tmp_path / 'yak.ckpt'}"], "was trained on other classes 'cat', 'dog', 'yak' than the 3"),
    ):
        assert message in fails([*arguments, *flags])
    assert not runs.exists() or list(runs.iterdir()) == []
