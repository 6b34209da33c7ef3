"""`relvit test --robustness`: each layout compared with the classifier image by image, among the classes present."""

import contextlib
import io
import json
import math
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import QUIET, only, rows, summary
from photos import CLASSES
from PIL import Image, ImageFilter

import relvit
from relvit.app.cli import main
from relvit.app.data.modules.robustness_sets import RobustnessData
from relvit.app.evaluation import evaluate_corruptions
from relvit.app.evaluation.trust.robustness import ALEXNET

NAMES = list(CLASSES)
OPTIONS = {"img_size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.9, "num_workers": 0}


@pytest.fixture(scope="module")
def corrupted(photos, tmp_path_factory):
    """Write two corruptions, one of them in a folder of its kind, with two severities, which cause mistakes."""
    root = tmp_path_factory.mktemp("set-c")
    for severity in (1, 2):
        for path in sorted((photos / "test").glob("*/*.jpg")):
            with Image.open(path) as image:
                blurred = image.filter(ImageFilter.GaussianBlur(severity))
                # At the second severity half of the images get the colour of the next class.
                shifted = Image.merge("RGB", image.split()[1:] + image.split()[:1]) if severity == 2 else image
            name, turned = path.parent.name, shifted if int(path.stem) % 2 else image
            for folder, picture in (("blur/gaussian_blur", blurred), ("colour", turned)):
                target = root / folder / str(severity) / name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                picture.save(target, quality=95)
    return root


def evaluated(checkpoint, root, tmp_path, *options):
    assert main(["test", str(checkpoint), f"--robustness={root}", f"--runs={tmp_path}", *options, *QUIET]) == 0
    folder = only(tmp_path)
    return folder, summary(folder)


def by_hand(checkpoint, paths, classes, mirror=False):
    """Compute the most probable class of each image among some classes."""
    predictor = relvit.load(checkpoint)
    order = [NAMES.index(name) for name in classes]
    with torch.no_grad():
        pixels = torch.cat([next(predictor.batches([path]))[0] for path in paths])
        probabilities = predictor.model(pixels)[:, order].softmax(-1)
        if mirror:
            probabilities += predictor.model(pixels.flip(-1))[:, order].softmax(-1)
        return [classes[i] for i in probabilities.argmax(-1).tolist()]


@pytest.fixture(scope="module")
def tested(best, corrupted, tmp_path_factory):
    """The folder, the summary and the output of a test on the corrupted images."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        folder, results = evaluated(best, corrupted, tmp_path_factory.mktemp("tested"))
    return folder, results, out.getvalue()


@pytest.fixture(scope="module")
def accuracies(best, corrupted):
    """Compute the accuracy for each corruption and severity."""
    expected = {}
    for name, severity in product(("blur/gaussian_blur", "colour"), ("1", "2")):
        paths = sorted((corrupted / name / severity).glob("*/*.jpg"))
        found = by_hand(best, paths, NAMES)
        right = [path.parent.name == one for path, one in zip(paths, found, strict=True)]
        expected[name, severity] = np.mean(right)
    assert len(set(expected.values())) > 1
    return expected


def test_the_table_has_the_accuracy_by_corruption_and_severity(tested, accuracies):
    found = rows(tested[0] / "corruptions.csv")
    assert [row["corruption"] for row in found] == ["blur/gaussian_blur", "colour", "mean"]
    for row in found[:2]:
        own = [accuracies[row["corruption"], severity] for severity in ("1", "2")]
        assert [float(row[key]) for key in ("1", "2", "mean")] == pytest.approx([*own, np.mean(own)], abs=6e-5)
    assert float(found[2]["mean"]) == pytest.approx(np.mean(list(accuracies.values())), abs=6e-5)


def test_the_summary_has_the_mean_corruption_error(tested, accuracies, corrupted):
    _, results, _ = tested
    assert results["test/mean_corruption_error"] == pytest.approx(1 - np.mean(list(accuracies.values())))
    assert results["images"] == 72
    assert "test/mce" not in results
    assert results["robustness"] == str(corrupted)


def test_the_output_has_the_mean_and_the_table(tested):
    assert "mean corruption error" in tested[2]
    assert "accuracy by corruption and severity" in tested[2]


def test_a_corruption_alone_is_named_by_its_folder(corrupted):
    data = RobustnessData(str(corrupted / "colour"), NAMES, **OPTIONS)
    data.dataset("test")
    assert data.conditions == [("colour", severity) for severity in (1, 2) for _ in range(18)]


def test_some_of_the_classes_under_other_names(best, corrupted, tmp_path):
    """The images are cats and owls, some in the colour of dogs, so the class dog must not be predicted."""
    root = tmp_path / "set-r"
    folders = {"n01": "cat", "n02": "owl"}
    for wnid, name in folders.items():
        shutil.copytree(corrupted / "colour" / "2" / name, root / wnid)
    (tmp_path / "map.json").write_text(json.dumps(folders))
    options = [f"--data.class_map={tmp_path / 'map.json'}", "--mirror=true"]
    folder, results = evaluated(best, root, tmp_path / "runs", *options)
    paths = sorted(root.glob("*/*.jpg"))
    # Without the restriction to these classes some images are predicted as dogs.
    assert "dog" in by_hand(best, paths, NAMES)
    found = by_hand(best, paths, ["cat", "owl"], mirror=True)
    right = [folders[path.parent.name] == name for path, name in zip(paths, found, strict=True)]
    assert results["test/acc1"] == pytest.approx(np.mean(right))
    assert sum(int(row["dog"]) for row in rows(folder / "confusion.csv")) == 0
    assert math.isfinite(results["test/loss"])
    assert not (folder / "corruptions.csv").exists()


def test_numbers_are_positions(photos, tmp_path):
    """The folders of ImageNet-V2 are numbers, whose alphabetical order differs from the order of the classes."""
    names = [*(f"other {number}" for number in range(9)), *NAMES]
    for name in NAMES:
        shutil.copytree(photos / "test" / name, tmp_path / str(names.index(name)))
    samples = RobustnessData(str(tmp_path), names, **OPTIONS).dataset("test").samples
    assert [Path(path).parent.name for path, _ in samples][::6] == ["10", "11", "9"]
    assert all(Path(path).parent.name == str(label) for path, label in samples)


def test_wordnet_ids(best, photos, tmp_path):
    content = torch.load(best, weights_only=True)
    wnids = [f"n0000000{number}" for number in range(3)]
    data = content["relvit"]["data"]
    data["class_path"], data["init_args"]["wnids"] = "relvit.app.data.ImageNetData", wnids
    torch.save(content, tmp_path / "imagenet.ckpt")
    shutil.copytree(photos / "test" / "owl", tmp_path / "set-a" / wnids[2])
    shutil.copytree(photos / "test" / "cat", tmp_path / "set-a" / wnids[0])
    _, results = evaluated(tmp_path / "imagenet.ckpt", tmp_path / "set-a", tmp_path / "runs")
    paths = [path for name in ("cat", "owl") for path in sorted((photos / "test" / name).glob("*.jpg"))]
    found = by_hand(best, paths, ["cat", "owl"])
    right = [path.parent.name == name for path, name in zip(paths, found, strict=True)]
    assert results["test/acc1"] == pytest.approx(np.mean(right))


def test_mce_is_that_of_the_paper():
    """CE is the sum of errors over the severities divided by AlexNet's sum; mCE is the mean over 15 corruptions."""
    generator = np.random.default_rng(0)
    conditions = [(f"kind/{name}", s) for name in [*ALEXNET, "spatter"] for s in range(1, 6) for _ in range(20)]
    right = generator.random(len(conditions)) < 0.6
    found = evaluate_corruptions(right, conditions, classes=1000)
    ratios = []
    for name, alexnet in ALEXNET.items():
        wrong = np.array([not ok for ok, (one, _) in zip(right, conditions, strict=True) if one == f"kind/{name}"])
        ratios.append(wrong.reshape(5, 20).mean(1).sum() / (5 * alexnet))
    assert found.results["test/mce"] == pytest.approx(np.mean(ratios))
    assert found.results["test/mean_corruption_error"] == pytest.approx(1 - right.mean())


def test_there_is_no_mce_for_other_classes_or_without_a_severity():
    conditions = [(f"kind/{name}", s) for name in ALEXNET for s in range(1, 6)]
    right = np.arange(len(conditions)) % 2 == 0
    assert "test/mce" in evaluate_corruptions(right, conditions, classes=1000).results
    assert "test/mce" not in evaluate_corruptions(right, conditions, classes=999).results
    part = [index for index, condition in enumerate(conditions) if condition != ("kind/fog", 3)]
    rest = evaluate_corruptions(right[part], [conditions[index] for index in part], 1000)
    assert "test/mce" not in rest.results
    fog = next(row for row in rest.table()[1] if row[0] == "kind/fog")
    assert fog[3] == ""


def test_what_does_not_fit(best, photos, tmp_path, fails):
    (tmp_path / "map.json").write_text('{"cat": "cta"}')
    (tmp_path / "mixed" / "snow" / "1").mkdir(parents=True)
    shutil.copytree(photos / "test" / "cat", tmp_path / "mixed" / "snow" / "1" / "cat")
    shutil.copytree(photos / "test" / "cat", tmp_path / "mixed" / "fog" / "cat")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.json").write_text("[1]")
    shutil.copytree(photos / "test" / "cat", tmp_path / "wnids" / "n00000005")
    test = f"--robustness={photos / 'test'}"
    for options, message in (
        ([f"--robustness={tmp_path / 'gone'}"], "give the folder of a robustness set"),
        ([test, f"--root={photos}"], "both name the images"),
        ([test, "--split=val"], "both name the images"),
        ([f"--robustness={photos}"], f"that holds CLASS/IMAGE, such as {photos / 'test'}, or CORRUPTION/SEVERITY"),
        ([test, f"--data.class_map={tmp_path / 'map.json'}"], "which the model does not have (did you mean 'cat'?)"),
    ):
        assert message in fails(["test", best, *options, f"--runs={tmp_path / 'runs'}", *QUIET])
    for root, class_map, message in (
        ("empty", None, "is empty"),
        ("mixed", None, "mixed/fog holds class folders, but its name is not a severity"),
        ("wnids", None, "n00000005 is a class that the training data or the"),
        ("mixed/fog", str(tmp_path / "list.json"), "list.json is not a JSON object of names"),
    ):
        with pytest.raises(ValueError, match=message):
            RobustnessData(str(tmp_path / root), NAMES, class_map=class_map, **OPTIONS).dataset("test")
    for root in ("mixed/fog", "mixed/snow"):
        assert len(RobustnessData(str(tmp_path / root), NAMES, **OPTIONS).dataset("test")) == 6
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
