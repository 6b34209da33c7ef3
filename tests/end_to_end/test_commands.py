"""Every command but fit as it is used: with its defaults, once in a terminal and once with its output in a file."""

import csv
import json
import re
import shutil

import numpy as np
import onnxruntime
import pytest
import torch
from photos import CLASSES
from PIL import Image
from processes import finish, in_terminal, start

import relvit

# Where a command draws no bar, what a terminal gets differs little: seldom tried.
PLACES = ["terminal", "file"]
MOSTLY_FILE = [pytest.param("terminal", marks=pytest.mark.slow), "file"]
TWO = ["--devices", "2", "--accelerator", "cpu"]


@pytest.fixture
def place(run, photos, tmp_path):
    """A working directory with a checkpoint and the photos, some of which cannot be read or are of another format."""
    shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "best.ckpt")
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "more").mkdir()
    Image.new("RGB", (24, 20), CLASSES["owl"]).save(tmp_path / "more" / "owl.gif")
    (tmp_path / "more" / "empty.jpg").touch()
    (tmp_path / "more" / "phone.heic").touch()
    return tmp_path


def relvit_in(where, place, *arguments, status=0):
    """What the command says; escape codes only in a terminal."""
    if where == "terminal":
        found, text = in_terminal(arguments, place)
    else:
        found, out, err = finish(start(arguments, place))
        text = f"{out}\n{err}"
        assert "\x1b" not in text
    assert found == status, text[-3000:]
    assert "Traceback" not in text
    return text


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def expected(place, split, size=None):
    """Paths, labels and probabilities, by Python, of the images of a split."""
    classifier = relvit.load(place / "best.ckpt", img_size=size)
    paths = sorted(map(str, (place / "photos" / split).glob("*/*.jpg")))
    names = list(CLASSES)
    labels = torch.tensor([names.index(path.split("/")[-2]) for path in paths])
    found = torch.tensor(
        [[dict(zip(p.names, p.probabilities, strict=True))[name] for name in names] for p in classifier.predict(paths)]
    )
    return paths, labels, found


def accuracy(labels, probabilities):
    return float((probabilities.argmax(-1) == labels).float().mean())


def run_folder(place):
    (folder,) = (place / "runs").iterdir()
    return folder


def check_validation(place, text):
    _, labels, probabilities = expected(place, "val", 24)
    loss = float(torch.nn.functional.nll_loss(probabilities.log(), labels))
    shown = {name: float(value) for name, value in re.findall(r"(val/\w+)\W+([\d.]+)", text)}
    assert shown["val/acc1"] == pytest.approx(accuracy(labels, probabilities))
    assert shown["val/loss"] == pytest.approx(loss, rel=1e-4)


def check_test(place, text):
    paths, labels, probabilities = expected(place, "test")
    folder = run_folder(place)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["images"], summary["split"]) == (18, "test")
    assert summary["test/acc1"] == pytest.approx(accuracy(labels, probabilities))
    assert "18 images of test, mean F1 of the classes" in text
    predicted = probabilities.argmax(-1)
    wrong = {path for path, one, other in zip(paths, labels, predicted, strict=True) if one != other}
    assert {row["path"] for row in rows(folder / "mistakes.csv")} == wrong
    counts = [[int(((labels == i) & (predicted == j)).sum()) for j in range(3)] for i in range(3)]
    assert [[int(row[name]) for name in CLASSES] for row in rows(folder / "confusion.csv")] == counts
    assert {path.name for path in folder.iterdir()} >= {"classes.csv", "confusion.png"}


def check_predictions(place, text):
    folder = run_folder(place)
    assert f"19 predictions in {folder.relative_to(place)}/predictions.csv" in text
    assert "1 image could not be read and was left out" in text
    assert "1 file left out: 1 .heic" in text
    found = rows(folder / "predictions.csv")
    assert found[-1]["path"] == "more/owl.gif"
    paths, _, probabilities = expected(place, "test")
    for row, path, values in zip(found, paths, probabilities, strict=False):
        assert str(place / row["path"]) == path
        assert row["class"] == list(CLASSES)[int(values.argmax())]
        assert float(row["probability"]) == pytest.approx(float(values.max()), abs=2e-6)
    assert [row["path"] for row in rows(folder / "unreadable.csv")] == ["more/empty.jpg"]


@pytest.mark.parametrize("where", MOSTLY_FILE)
def test_validate(place, where):
    text = relvit_in(where, place, "validate", "best.ckpt", "--root", "photos", "--img_size", "24")
    check_validation(place, text)
    assert not (place / "runs").exists()


@pytest.mark.parametrize("where", MOSTLY_FILE)
def test_test(place, where):
    check_test(place, relvit_in(where, place, "test", "best.ckpt", "--root", "photos"))


@pytest.mark.parametrize("where", PLACES)
def test_predict(place, where):
    check_predictions(place, relvit_in(where, place, "predict", "best.ckpt", "photos/test/*/*.jpg", "more"))


@pytest.mark.slow
def test_two_processes(place):
    text = relvit_in("terminal", place, "validate", "best.ckpt", "--root", "photos", "--img_size", "24", *TWO)
    check_validation(place, text)
    check_test(place, relvit_in("file", place, "test", "best.ckpt", "--root", "photos", *TWO))
    shutil.rmtree(place / "runs")
    text = relvit_in("terminal", place, "predict", "best.ckpt", "photos/test/*/*.jpg", "more", *TWO)
    check_predictions(place, text)


@pytest.mark.parametrize("where", MOSTLY_FILE)
def test_resolutions(place, where):
    sizes = ["--sizes", "16", "24", "[16,32]", "--split", "test", "--root", "photos", "--output", "table.csv"]
    text = relvit_in(where, place, "resolutions", "best.ckpt", *sizes)
    assert "best.ckpt on test" in text
    found = rows(place / "table.csv")
    assert [(row["height"], row["width"]) for row in found] == [("16", "16"), ("24", "24"), ("16", "32")]
    for row, size in zip(found, (16, 24, (16, 32)), strict=True):
        _, labels, probabilities = expected(place, "test", size)
        assert float(row["acc1"]) == pytest.approx(accuracy(labels, probabilities))
        assert f"{float(row['acc1']):.4f}" in text


@pytest.mark.parametrize("where", PLACES)
def test_embed(place, where):
    shutil.copytree(place / "more", place / "photos" / "test" / "owl" / "more")
    text = relvit_in(where, place, "embed", "best.ckpt", "photos/test", "--output", "features.npz")
    assert "19 images, 16 features each, in features.npz" in text
    assert "1 file left out: 1 .heic" in text
    found = np.load(place / "features.npz")
    paths, *_ = expected(place, "test")
    assert [str(place / path) for path in found["path"] if path.endswith("jpg")] == paths
    assert found["class"].tolist() == [path.split("/")[2] for path in found["path"]]
    features = relvit.load(place / "best.ckpt").embed(paths)
    jpegs = [path.endswith("jpg") for path in found["path"]]
    torch.testing.assert_close(torch.from_numpy(found["features"][jpegs]), features)
    assert len(rows(place / "features.unreadable.csv")) == 1


@pytest.mark.parametrize(("where", "name"), [("terminal", "model.onnx"), ("file", "model.pt2")])
def test_export(place, where, name):
    text = relvit_in(where, place, "export", "best.ckpt", "--output", name)
    assert f"{name} computes what the model does" in text
    assert json.loads((place / "model.json").read_text())["class_names"] == list(CLASSES)
    classifier = relvit.load(place / "best.ckpt")
    x = torch.stack([classifier.transform(Image.open(place / "photos/test/cat/0.jpg").convert("RGB"))])
    if name == "model.onnx":
        session = onnxruntime.InferenceSession(place / name, providers=["CPUExecutionProvider"])
        logits = torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])
    else:
        logits = torch.export.load(place / name).module()(x).detach()
    torch.testing.assert_close(logits.softmax(-1), classifier.probabilities(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", MOSTLY_FILE)
def test_average(place, run, where):
    shutil.copy(run / "checkpoints" / "last.ckpt", place / "last.ckpt")
    text = relvit_in(where, place, "average", "best.ckpt", "last.ckpt", "--output", "averaged.ckpt")
    assert "relvit validate averaged.ckpt" in text
    weights = [
        relvit.load(place / name).classifier.state_dict() for name in ("best.ckpt", "last.ckpt", "averaged.ckpt")
    ]
    for one, other, mean in zip(*(state.values() for state in weights), strict=True):
        torch.testing.assert_close(mean, (one + other) / 2)


@pytest.mark.parametrize("where", MOSTLY_FILE)
def test_check_data(place, where):
    shutil.copy(place / "more" / "phone.heic", place / "photos" / "train" / "cat")
    shutil.copy(place / "photos" / "train" / "dog" / "1.jpg", place / "photos" / "train" / "cat" / "dog.jpg")
    text = relvit_in(where, place, "check-data", "photos", "--output", "report.json")
    assert "files that cannot be read: 0" in text
    assert "1 file left out: 1 .heic" in text
    assert "the same image under different classes: 1" in text
    assert json.loads((place / "report.json").read_text())["splits"]["train"]["classes"]["cat"] == 7
    shutil.copy(place / "more" / "empty.jpg", place / "photos" / "val" / "cat")
    text = relvit_in(where, place, "check-data", "photos", status=1)
    assert "files that cannot be read: 1" in text
