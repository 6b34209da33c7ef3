"""Multi-label classification on the command line with default options, from a list of images to predictions."""

import contextlib
import csv
import io
import json
import shutil

import numpy as np
import pytest
import sklearn.metrics
import torch
from command_line import QUIET, evaluate, only, rows, summary
from photos import TINY
from PIL import Image

import relvit
from relvit.app.cli import main
from relvit.app.data import ImageListData
from relvit.app.training import load_classifier
from relvit.app.training.class_metrics import multi_label_metrics

pytestmark = pytest.mark.slow

COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 40), "red": (220, 40, 40)}


def write_lists(root):
    """Write grey pictures with squares in some of three colours, or without squares, and a list for each split."""
    generator = np.random.default_rng(0)
    for split, count in {"train": 48, "test": 24}.items():
        (root / split).mkdir(parents=True)
        rows = [("path", "label")]
        for number in range(count):
            pixels = generator.normal(120, 20, (16, 24, 3))
            present = [name for name in COLOURS if generator.random() < 0.4]
            for name, cell in zip(present, generator.permutation(6), strict=False):
                row, column = 8 * (cell // 3), 8 * (cell % 3)
                pixels[row : row + 8, column : column + 8] += np.array(COLOURS[name]) - 120
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / split / f"{number}.png")
            rows.append((f"{split}/{number}.png", ";".join(present)))
        with open(root / f"{split}.csv", "w", newline="") as file:
            csv.writer(file).writerows(rows)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of the images, and of the run."""
    root = write_lists(tmp_path_factory.mktemp("several"))
    lists = [f"--data.{split}={root / split}.csv" for split in ("train", "test")]
    arguments = ["fit", "--data=ImageListData", *lists, "--data.label_separator=;", f"--runs={root / 'runs'}", *TINY]
    arguments += ["--data.img_size=[16,24]", "--data.augment=none", "--data.crop_pct=1"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*arguments, "--epochs", "12", "--lr", "2e-2", "--patience", "12", "--data.val_fraction=0.3"]) == 0
    # The suggestions contain no command that refuses images with several labels.
    assert "relvit show, calibrate, embed, export, publish" in printed.getvalue()
    return root, only(root / "runs")


@pytest.fixture(scope="module")
def expected(trained):
    """Compute labels and probabilities of val and test, image by image."""
    clf = relvit.load(trained[1] / "checkpoints" / "best.ckpt")
    data = clf.checkpoint.data_module()
    found = {}
    for split in ("val", "test"):
        labels = np.stack(data.dataset(split).targets)
        found[split] = labels, clf.probabilities(torch.stack([image for image, _ in data.dataset(split)])).numpy()
    return found


def run(trained, tmp_path, command, *arguments):
    """Run a command on the best checkpoint; return the new run's folder."""
    return evaluate(command, trained[1] / "checkpoints" / "best.ckpt", tmp_path / "runs", *arguments)


def average_precision(labels, probabilities):
    return np.mean(
        [sklearn.metrics.average_precision_score(*pair) for pair in zip(labels.T, probabilities.T, strict=True)]
    )


@pytest.fixture(scope="module")
def thresholds(trained):
    """The thresholds in the trained checkpoint."""
    return load_classifier(trained[1] / "checkpoints" / "best.ckpt").thresholds


def test_thresholds_are_those_of_the_best_f1_on_val(thresholds, expected):
    labels, probabilities = expected["val"]
    np.testing.assert_allclose(thresholds, multi_label_metrics(probabilities, labels).threshold, rtol=1e-5)


def test_the_summary_has_average_precision_and_f1(trained, expected, thresholds):
    results = summary(trained[1])
    labels, probabilities = expected["val"]
    assert results["val/map"] == pytest.approx(average_precision(labels, probabilities), rel=1e-5)
    assert results["val/map"] == max(float(row["val/map"]) for row in rows(trained[1] / "metrics.csv"))
    labels, probabilities = expected["test"]
    assert results["test/map"] == pytest.approx(average_precision(labels, probabilities), rel=1e-5)
    f1 = sklearn.metrics.f1_score(labels, probabilities >= thresholds, average="macro")
    assert results["test/f1"] == pytest.approx(f1, rel=1e-5)
    assert results["test/map"] > 0.8


def test_the_run_has_pictures_and_the_labels_of_its_split(trained):
    root, folder = trained
    assert {"curves.png", "training_images.png", "val_split.csv"} <= {path.name for path in folder.iterdir()}
    written = {row["path"]: row["label"] for row in rows(root / "train.csv")}
    held_out = rows(folder / "val_split.csv")
    assert all(set(row["label"].split(";")) == set(written[row["path"]].split(";")) for row in held_out)


@pytest.fixture(scope="module")
def tested(trained, tmp_path_factory):
    """The folder of `relvit test`, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        folder = run(trained, tmp_path_factory.mktemp("tested"), "test")
    return folder, out.getvalue()


def test_test_prints_f1_and_average_precision(tested):
    folder, out = tested
    f1 = f"mean F1 of the classes {summary(folder)['test/f1']:.4f}, mean average precision"
    assert f"24 images of test at 16 x 24 px, {f1}" in out


def test_the_table_of_classes_is_that_of_the_probabilities(tested, expected, thresholds):
    labels, probabilities = expected["test"]
    metrics = multi_label_metrics(probabilities, labels, thresholds)
    table = rows(tested[0] / "classes.csv")
    assert [row["class"] for row in table] == list(COLOURS)
    for name in ("precision", "recall", "f1", "average_precision", "threshold"):
        assert [float(row[name]) for row in table] == pytest.approx(getattr(metrics, name), abs=1e-4)


def test_mistakes_have_a_wrong_label_and_are_sorted_by_loss(tested, expected, thresholds):
    folder, (labels, probabilities) = tested[0], expected["test"]
    wrong = (labels != (probabilities >= thresholds)).any(1)
    mistakes = rows(folder / "mistakes.csv") if wrong.any() else []
    assert len(mistakes) == wrong.sum()
    losses = [float(row["loss"]) for row in mistakes]
    assert losses == sorted(losses, reverse=True)


def test_validate_prints_average_precision_at_another_size(trained, capsys):
    assert main(["validate", str(trained[1] / "checkpoints" / "best.ckpt"), "--img_size", "24", *QUIET]) == 0
    assert "val/map" in capsys.readouterr().out


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    """The table that `relvit predict` writes for the test images."""
    return run(trained, tmp_path_factory.mktemp("predicted"), "predict", trained[0] / "test") / "predictions.csv"


def test_predict_writes_the_classes_above_their_thresholds(trained, written, expected, thresholds):
    root, folder = trained
    _, probabilities = expected["test"]
    table = {row["path"]: row for row in rows(written)}
    assert list(next(iter(table.values()))) == ["path", "label", "probability"]
    found = relvit.load(folder / "checkpoints" / "best.ckpt").predict(root / "test")
    assert len(table) == len(found) == 24
    for prediction in found:
        row = table[prediction.path]
        number = int(prediction.path.rpartition("/")[2].removesuffix(".png"))
        above = [i for i in (-probabilities[number]).argsort() if probabilities[number][i] >= thresholds[i]]
        assert row["label"] == ";".join(prediction.names) == ";".join(list(COLOURS)[i] for i in above)
        assert prediction.probabilities == pytest.approx(probabilities[number][above], abs=1e-5)
        assert [float(p) for p in row["probability"].split(";") if p] == pytest.approx(
            prediction.probabilities, abs=1e-5
        )
    assert {len(prediction.names) for prediction in found} >= {0, 1, 2}


def test_predictions_are_a_list_to_train_on(written):
    again = ImageListData(str(written), label_separator=";", class_names=list(COLOURS), num_workers=0)
    assert len(again.samples("train")) + len(again.samples("val")) == 24


def test_top_and_mirror_in_python(trained):
    root, folder = trained
    clf = relvit.load(folder / "checkpoints" / "best.ckpt")
    assert len(clf.predict(root / "test" / "0.png", top=2).names) == 2
    mirrored = clf.predict(root / "test" / "0.png", top=3, mirror=True)
    image = clf.transform(Image.open(root / "test" / "0.png"))[None]
    mean = (clf.probabilities(image) + clf.probabilities(image.flip(-1))) / 2
    assert mirrored.probabilities == pytest.approx(sorted(mean[0].tolist(), reverse=True), abs=1e-5)


@pytest.fixture(scope="module")
def published(trained, tmp_path_factory):
    """A folder with `curves` of `relvit resolutions`, and the model `published` with these curves."""
    place, best = tmp_path_factory.mktemp("published"), str(trained[1] / "checkpoints" / "best.ckpt")
    with contextlib.chdir(place):
        assert main(["resolutions", best, "--sizes", "[16,24]", "24", "--split", "test", "--output", "curves"]) == 0
        assert main(["publish", best, "--to", "published", "--curve", "curves/resolutions.json"]) == 0
    return place


def test_resolutions_have_the_figures_of_the_test(trained, published):
    results = summary(trained[1])
    curve = json.loads((published / "curves" / "resolutions.json").read_text())
    for name in ("map", "f1", "loss"):
        assert curve[0][name] == pytest.approx(results[f"test/{name}"], rel=1e-5)


def test_the_published_model_has_thresholds_and_the_card_its_figures(published, thresholds):
    assert json.loads((published / "published" / "config.json").read_text())["relvit"]["thresholds"] == thresholds
    card = (published / "published" / "README.md").read_text()
    assert str(thresholds) in card
    assert "| size | protocol | reach | split | images | mAP | mean F1 |" in card


def test_the_recipe_and_the_results_are_those_of_several_labels(trained, published, tmp_path):
    recipe = (published / "published" / "README.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    assert "label_separator" in recipe
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, copy in (("summary.json", "summary.json"), ("checkpoints/best.ckpt", "checkpoints/best_calibrated.ckpt")):
        shutil.copy(trained[1] / name, tmp_path / "run" / copy)
    calibrated = tmp_path / "run" / "checkpoints" / "best_calibrated.ckpt"
    assert main(["publish", str(calibrated), "--to", str(tmp_path / "calibrated")]) == 0
    card = (tmp_path / "calibrated" / "README.md").read_text()
    assert f"- test/map: {summary(trained[1])['test/map']:.4f}" in card
    assert "test/f1" not in card


def test_the_code_of_the_card_finds_the_same_classes(trained, published, monkeypatch, capsys):
    monkeypatch.chdir(published)
    card = (published / "published" / "README.md").read_text()
    shutil.copy(trained[0] / "test" / "1.png", "photo.jpg")
    exec(card.partition("```python\n")[2].partition("```")[0], {})
    found = relvit.load(trained[1] / "checkpoints" / "best.ckpt").predict("photo.jpg")
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == sorted(found.names)


@pytest.mark.elsewhere
def test_the_pipeline_of_transformers_has_the_same_probabilities(trained, published):
    transformers = pytest.importorskip("transformers")
    photo, folder = trained[0] / "test" / "1.png", str(published / "published")
    found = relvit.load(trained[1] / "checkpoints" / "best.ckpt").predict(photo, top=3)
    theirs = transformers.pipeline("image-classification", model=folder)(Image.open(photo))
    assert [each["label"] for each in theirs] == found.names
    assert [each["score"] for each in theirs] == pytest.approx(found.probabilities, abs=1e-5)


@pytest.fixture(scope="module")
def copies(trained, thresholds, tmp_path_factory):
    """A folder with three copies of the checkpoint, of which the last has other thresholds."""
    place = tmp_path_factory.mktemp("copies")
    best = torch.load(trained[1] / "checkpoints" / "best.ckpt", weights_only=True)
    for name, values in {"a": thresholds, "b": thresholds, "c": [0.25] * 3}.items():
        best["relvit"]["thresholds"] = values
        torch.save(best, place / f"{name}.ckpt")
    return place


def test_the_average_keeps_thresholds_that_all_have(copies, thresholds, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(shutil.copytree(copies, tmp_path / "copies"))
    assert main(["average", "a.ckpt", "b.ckpt", "--output", "same.ckpt"]) == 0
    assert load_classifier("same.ckpt").thresholds == thresholds
    assert "thresholds" not in capsys.readouterr().err


def test_calibrate_finds_thresholds_anew_where_those_of_an_average_differ(
    copies, expected, thresholds, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(shutil.copytree(copies, tmp_path / "copies"))
    with pytest.warns(
        UserWarning, match="in mean.ckpt the threshold of every class is 0.5; .* relvit calibrate mean.ckpt"
    ):
        assert main(["average", "a.ckpt", "c.ckpt", "--output", "mean.ckpt"]) == 0
    assert load_classifier("mean.ckpt").thresholds == [0.5] * 3
    # The mean has the weights of the best checkpoint, so the calibration finds the thresholds of the best checkpoint.
    capsys.readouterr()
    assert main(["calibrate", "mean.ckpt"]) == 0
    np.testing.assert_allclose(load_classifier("mean_calibrated.ckpt").thresholds, thresholds, rtol=1e-5)
    labels, probabilities = expected["val"]
    before, after = (multi_label_metrics(probabilities, labels, given).means()["f1"] for given in ([0.5] * 3, None))
    out = capsys.readouterr().out
    assert f"{len(labels)} images of val: 3 thresholds of the best F1 of each class" in out
    assert f"{before:.4f}" in out
    assert f"{after:.4f}" in out


def test_onnx(trained, tmp_path, monkeypatch, capsys):
    """The predictions of an ONNX file, and the change of the metrics by int8."""
    monkeypatch.chdir(tmp_path)
    # All images have one size, so export for this size: a graph for all sizes takes four times as long.
    monkeypatch.setattr("relvit.app.evaluation.deploy.onnx_and_pt2._takes_any_size", lambda net: False)
    best = str(trained[1] / "checkpoints" / "best.ckpt")
    assert main(["export", best, "--output", "model.onnx", "--int8"]) == 0
    assert "Mean average precision on" in capsys.readouterr().out
    assert main(["predict", "--model", "model.onnx", str(trained[0] / "test")]) == 0
    by_file = rows(next(tmp_path.glob("runs/*/predictions.csv")))
    found = relvit.load(best).predict(trained[0] / "test")
    assert {len(prediction.names) for prediction in found} >= {1, 2}
    same = [row["label"] == ";".join(prediction.names) for row, prediction in zip(by_file, found, strict=True)]
    assert sum(same) >= 22


def test_what_is_for_one_label_is_refused(trained, tmp_path, capsys):
    best = str(trained[1] / "checkpoints" / "best.ckpt")
    for name in COLOURS:
        (tmp_path / "photos" / name).mkdir(parents=True)
        shutil.copy(trained[0] / "test" / "0.png", tmp_path / "photos" / name)
    for arguments, message in (
        (["probe", best], "probes need one label for each image"),
        (
            ["test", best, "--robustness", str(tmp_path / "photos"), "--runs", str(tmp_path / "runs"), *QUIET],
            "the model is for several labels per image (multi_label True), the data have one",
        ),
    ):
        assert main(arguments) != 0
        assert message in capsys.readouterr().err.replace("\n", " ")
