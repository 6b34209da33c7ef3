"""The files and metrics of `relvit test`, compared with the classifier image by image."""

import re
import shutil

import numpy as np
import pytest
import sklearn.metrics
import torch
from command_line import QUIET, evaluate, only, rows, summary
from photos import CLASSES, write_photos
from PIL import Image
from processes import Ranks, as_torchrun
from torchmetrics.functional.classification import multiclass_calibration_error

from relvit.app.data import DigitsData, ImageFolderData
from relvit.app.training import load_classifier
from relvit.app.utils.files import from_here

NAMES = list(CLASSES)
# Of the six test images of each class, 6, 5 and 6 can be read.
ENDS = r"17 images of test at 16 x 16 px, accuracy [\d.]{6} ± [\d.]{6}, mean F1 of .* error [\d.]{6}; .*: 0\.3529\n"


@pytest.fixture(scope="module")
def mixed_up(tmp_path_factory):
    """Test images: every third one is in the folder of another class, and one of 18 cannot be read."""
    root = write_photos(tmp_path_factory.mktemp("mixed") / "photos", splits=("test",))
    for number in (1, 4):
        files = [root / "test" / name / f"{number}.jpg" for name in NAMES]
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
            file.write_bytes(content)
    broken = root / "test" / "dog" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:50])
    return root


def outcomes(best, root, mirror=False):
    """Compute paths, labels and probabilities of the test images that can be read."""
    classifier = load_classifier(best)
    data = ImageFolderData(str(root), img_size=16, class_names=NAMES).dataset("test")
    paths, labels, probabilities = [], [], []
    for index, (path, label) in enumerate(data.samples):
        if path.endswith("dog/2.jpg"):
            continue
        image = data[index][0][None]
        with torch.no_grad():
            found = classifier(image).softmax(-1)
            if mirror:
                found = (found + classifier(image.flip(-1)).softmax(-1)) / 2
        paths.append(path)
        labels.append(label)
        probabilities.append(found[0])
    return np.array(paths), torch.tensor(labels), torch.stack(probabilities)


def check(folder, best, root, mirror=False):
    paths, labels, probabilities = outcomes(best, root, mirror)
    confidence, predicted = probabilities.max(-1)
    results = summary(folder)
    assert results["images"] == 17
    assert results["unreadable"] == {"test": 1}
    assert (results["img_size"], results["mirror"]) == ([16, 16], mirror)
    assert results["test/acc1"] == pytest.approx(float((labels == predicted).float().mean()))
    loss = torch.nn.functional.nll_loss(probabilities.log(), labels)
    assert results["test/loss"] == pytest.approx(float(loss), rel=1e-4)
    ece = multiclass_calibration_error(probabilities, labels, 3, n_bins=15, norm="l1")
    assert results["test/calibration_error"] == pytest.approx(float(ece), abs=1e-5)
    assert results["test/f1"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted, average="macro"))

    expected = sklearn.metrics.precision_recall_fscore_support(labels, predicted, zero_division=np.nan)
    for row, name, *values in zip(rows(folder / "classes.csv"), NAMES, *expected, strict=True):
        assert row["class"] == name
        for column, value in zip(("precision", "recall", "f1", "count"), values, strict=True):
            assert float(row[column] or "nan") == pytest.approx(value, abs=1e-4, nan_ok=True)
    confusion = sklearn.metrics.confusion_matrix(labels, predicted)
    found = rows(folder / "confusion.csv")
    assert [row["true"] for row in found] == NAMES
    assert [[int(row[name]) for name in NAMES] for row in found] == confusion.tolist()

    wrong = torch.nonzero(labels != predicted)[:, 0]
    wrong = wrong[confidence[wrong].argsort(descending=True)].tolist()
    assert len(wrong) >= 6
    found = rows(folder / "mistakes.csv")
    assert [row["path"] for row in found] == [from_here(paths[i]) for i in wrong]
    assert [row["true"] for row in found] == [NAMES[labels[i]] for i in wrong]
    assert [row["predicted"] for row in found] == [NAMES[predicted[i]] for i in wrong]
    assert [float(row["probability"]) for row in found] == pytest.approx(confidence[wrong].tolist(), abs=2e-6)
    with Image.open(folder / "confusion.png") as figure:
        assert figure.size == (600, 540)
    assert (folder / "mistakes.png").is_file()
    assert [row["path"] for row in rows(folder / "unreadable.csv")] == [f"{root}/test/dog/2.jpg"]


@pytest.mark.parametrize("mirror", [False, True])
def test_report(best, mixed_up, tmp_path, mirror, figures, capsys):
    options = ["--data.on_error=skip", "--data.batch_size=4", f"--mirror={str(mirror).lower()}"]
    folder = evaluate("test", best, tmp_path, f"--data.root={mixed_up}", *options)
    check(folder, best, mixed_up, mirror)
    out = capsys.readouterr().out
    for row in rows(folder / "classes.csv"):
        assert all(value in out for value in row.values())
    assert re.search(ENDS, out)
    assert f"Files: {folder} (classes.csv, confusion.csv, confusion.png, mistakes.csv, mistakes.png, summary" in out


@pytest.mark.slow
def test_two_processes_write_the_same_once(best, mixed_up, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["test", best, f"--data.root={mixed_up}", f"--runs={tmp_path / 'runs'}", "--data.on_error=skip"]
    ranks = Ranks([*arguments, "--data.batch_size=4", *QUIET], tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    check(only(tmp_path / "runs"), best, mixed_up)
    assert len(re.findall(ENDS, ranks.text())) == 1


def test_images_in_memory_and_more_mistakes_than_the_sheet_holds(digits_run, figures, tmp_path):
    best = digits_run / "checkpoints" / "best.ckpt"
    folder = evaluate("test", best, tmp_path / "test")
    results = summary(folder)
    assert results["images"] == 360
    assert results["test/acc5"] > results["test/acc1"]
    found = rows(folder / "mistakes.csv")
    assert len(found) == round(360 * (1 - results["test/acc1"])) > 25
    classifier = load_classifier(best)
    data = DigitsData().dataset("test")
    for row in found[::20]:
        image, label = data[int(row["path"].removeprefix("test/"))]
        with torch.no_grad():
            probability, predicted = classifier(image[None]).softmax(-1)[0].max(-1)
        assert (row["true"], row["predicted"]) == (str(label), str(int(predicted)))
        assert float(row["probability"]) == pytest.approx(float(probability), abs=2e-6)
    with Image.open(folder / "mistakes.png") as sheet:
        assert sheet.size == (1100, 1330)


def test_nothing_can_be_read(best, tmp_path, fails):
    for name in NAMES:
        (tmp_path / "photos" / "test" / name).mkdir(parents=True)
        (tmp_path / "photos" / "test" / name / "0.jpg").touch()
    arguments = ["test", best, f"--data.root={tmp_path / 'photos'}", f"--runs={tmp_path / 'runs'}"]
    message = fails([*arguments, "--data.on_error=skip", *QUIET])
    folder = only(tmp_path / "runs")
    # The line of output before the error names unreadable.csv, so the error does not name it again.
    assert re.search("error: none of the images could be read; the first: .*/0.jpg: the file is empty .*\n$", message)
    assert len(rows(folder / "unreadable.csv")) == 3


def test_without_a_test_folder_val_is_named(best, photos, tmp_path, fails):
    root = shutil.copytree(photos, tmp_path / "photos")
    shutil.rmtree(root / "test")
    message = fails(["test", best, f"--root={root}", f"--runs={tmp_path / 'runs'}", *QUIET])
    assert "no test folder in" in message
    assert "or test on the images of val, by --split val" in message
    evaluate("test", best, tmp_path / "runs", f"--root={root}", "--split=val")


@pytest.mark.parametrize("name", ["test", "new"])
def test_a_part_of_the_images_that_are_named_is_not_suggested(name, best, photos, tmp_path, fails):
    """Do not suggest to hold out a tenth of the images as val: the user has named the folder of the test images."""
    root = shutil.copytree(photos / "test", tmp_path / "photos" / name)
    message = fails(["test", best, f"--root={root}", f"--runs={tmp_path / 'runs'}", *QUIET])
    assert ("the folder that holds it" if name == "test" else f"into {root}/test, or") in message
    assert "--split val" not in message


def test_another_split(best, photos, tmp_path, capsys):
    """Each image of train is evaluated once, in order and without augmentation, as if it were an image of test."""
    root = tmp_path / "photos"
    shutil.copytree(photos / "train", root / "test")
    given = {"split": [f"--root={photos}", "--split=train"], "folder": [f"--root={root}"]}
    found, expected = (evaluate("test", best, tmp_path / name, *given[name], "--batch_size=5") for name in given)
    assert "18 images of train at 16 x 16 px, accuracy " in capsys.readouterr().out
    for name in ("classes.csv", "confusion.csv"):
        assert (found / name).read_text() == (expected / name).read_text()
    ours, theirs = summary(found), summary(expected)
    assert (ours.pop("split"), theirs.pop("split")) == ("train", "test")
    assert ours.pop("img_size") == theirs.pop("img_size")
    assert ours == pytest.approx(theirs)


def test_tables_stay_where_a_figure_fails(best, photos, tmp_path, monkeypatch, fails):
    monkeypatch.setattr("relvit.app.evaluation.report.plot_confusion", lambda *_: 1 / 0)
    message = fails(["test", best, f"--data.root={photos}", f"--runs={tmp_path}", *QUIET], 1)
    assert "ZeroDivisionError" in message
    assert {"classes.csv", "confusion.csv"} <= {path.name for path in only(tmp_path).iterdir()}
