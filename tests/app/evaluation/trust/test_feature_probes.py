"""Probes compared with brute force and scikit-learn; features compared with `relvit embed`."""

import json
import multiprocessing
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import rows, write_checkpoint_like
from PIL import Image
from sklearn.linear_model import LogisticRegression

import relvit
from relvit.app.cli import main
from relvit.app.data import DigitsData, ImageFolderData
from relvit.app.evaluation import probe_models
from relvit.app.evaluation.standard_error import accuracy_error
from relvit.app.evaluation.trust.feature_probes import STRENGTHS, choose_labels, knn_right, linear_right


def clusters(count, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, count)
    centres = np.random.default_rng(0).normal(size=(4, 6))
    return (centres[labels] + generator.normal(0, 1.2, (count, 6))).astype(np.float32), labels


@pytest.mark.parametrize("k", [1, 7, 500])
def test_neighbours_by_brute_force(k):
    (features, labels), (queries, truth) = clusters(90, 1), clusters(60, 2)
    right = 0
    for query, label in zip(queries.astype(np.float64), truth, strict=True):
        similar = features @ query / np.linalg.norm(features, axis=1) / np.linalg.norm(query)
        nearest = np.argsort(-similar)[:k]
        votes = np.bincount(labels[nearest], np.exp(similar[nearest] / 0.07), 4)
        right += votes.argmax() == label
    assert knn_right(features, labels, queries, truth, k).sum() == right
    assert 0.3 < right / 60 < 1


def test_the_linear_probe_is_logistic_regression_with_a_chosen_strength():
    (features, labels), (queries, truth) = clusters(90, 1), clusters(60, 2)
    found, strength = linear_right(features, labels, queries, truth, 0)
    assert strength in STRENGTHS
    mean, std = features.mean(0), features.std(0)
    model = LogisticRegression(C=strength, max_iter=1000).fit((features - mean) / std, labels)
    assert found.mean() == model.score((queries - mean) / std, truth)
    # If the features are noise, the strongest weight decay is among the best, so the smallest C is chosen.
    noise = np.random.default_rng(3).normal(size=(40, 30)).astype(np.float32)
    one_each = [int(np.flatnonzero(labels == label)[0]) for label in range(4)]
    assert linear_right(features[one_each], labels[one_each], queries, truth, 0)[1] == 1
    assert linear_right(noise, np.arange(40) % 10 // 9, noise, np.arange(40) % 10 // 9, 0)[1] == STRENGTHS[0]


def test_shares_keep_the_proportions_and_hold_one_another():
    labels = np.repeat([0, 1, 2], [200, 100, 4])
    chosen = {share: choose_labels(labels, share, seed=5) for share in (0.01, 0.1, 1.0)}
    assert {share: np.bincount(labels[found]).tolist() for share, found in chosen.items()} == {
        0.01: [2, 1, 1],
        0.1: [20, 10, 1],
        1.0: [200, 100, 4],
    }
    assert set(chosen[0.01]) < set(chosen[0.1]) < set(chosen[1.0])
    assert not np.array_equal(chosen[0.1], choose_labels(labels, 0.1, seed=6))
    np.testing.assert_array_equal(chosen[0.1], choose_labels(labels, 0.1, seed=5))


def test_the_labels_are_not_searched_for_each_class():
    class Labels(np.ndarray):
        def __getitem__(self, index):
            searched.append(np.size(index) == len(self))
            return super().__getitem__(index)

    counts = []
    for classes in (3, 30):
        searched = []
        choose_labels(np.arange(60).view(Labels) % classes, 0.5, seed=0)
        counts.append(sum(searched))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_the_command_at_its_defaults(digits_run, tmp_path, figures, capsys):
    path = digits_run / "checkpoints" / "best.ckpt"
    assert main(["probe", str(path), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    table = rows(tmp_path / "probe.csv")
    assert json.loads((tmp_path / "probe.json").read_text())[2]["labels"] == 1257
    assert [(row["share"], row["split"]) for row in table] == [("0.01", "val"), ("0.1", "val"), ("1.0", "val")]
    assert all(f"{float(row['knn']):.4f}" in out and f"{float(row['linear']):.4f}" in out for row in table)
    with Image.open(tmp_path / "probe.png") as image:
        assert image.size == (900, 650)
    # Users get the same features in Python.
    predictor, data = relvit.load(path), DigitsData()
    data.evaluate_on("train")
    parts = []
    for split in ("train", "val"):
        images, labels = zip(*(data.dataset(split)[index] for index in range(len(data.dataset(split)))), strict=True)
        parts += [predictor.features(torch.stack(images)).numpy(), np.array(labels)]
    features, labels, queries, truth = parts
    for row in table:
        chosen = choose_labels(labels, float(row["share"]), 0)
        known = features[chosen], labels[chosen], queries, truth
        assert float(row["knn"]) == pytest.approx(knn_right(*known, 20).mean(), abs=0.006)
        assert float(row["linear"]) == pytest.approx(linear_right(*known, 0)[0].mean(), abs=0.02)
    assert float(table[2]["linear"]) > float(table[0]["linear"]) + 0.1


def test_differences_of_two_models(digits_run, tmp_path):
    first = digits_run / "checkpoints" / "best.ckpt"
    options = {"patch_size": 4, "embed_dim": 16, "depth": 1}
    second = write_checkpoint_like(first, tmp_path / "other.ckpt", "test_relvit", options)
    ours, theirs = probe_models([first, second], shares=[0.02])
    assert not [name for name in ours if "difference" in name]
    for probe in ("knn", "linear"):
        assert theirs[f"{probe}_difference"] == pytest.approx(theirs[probe] - ours[probe])
        assert theirs[f"{probe}_difference"] != 0 < theirs[f"{probe}_difference_se"] < 0.1


@pytest.mark.parametrize(
    ("models", "shares", "message"),
    [
        (["a.ckpt", Path("a.ckpt")], [1], "model a.ckpt is given more than once: give each once"),
        (["a.ckpt"], [0.1, 1, 1.0], "share 1 is given more than once"),
        (["a.ckpt"], [], "no share is given: give one or more"),
    ],
)
def test_rows_that_could_not_be_told_apart(models, shares, message):
    """A model that is given twice had lines such as '1 minus 1' in the output, and one curve of all its rows."""
    with pytest.raises(ValueError, match=re.escape(message)):
        probe_models(models, shares=shares)


def test_random_weights_are_for_names_alone(fails):
    """The option was ignored, and the checkpoint's own weights were evaluated."""
    message = fails(["probe", "a.ckpt", "b.ckpt", "--random"])
    assert "--random is for models given by name, and all of these are checkpoints: leave it out" in message


def test_all_models_are_loaded_before_the_first_is_evaluated(best, photos, tmp_path):
    """A misspelt name was an error after the features of all models in front of it."""

    def progress(batches, count, text):
        raise AssertionError(f"{text} was computed")

    data = ImageFolderData(str(photos), num_workers=0)
    for second, message in (("tset_vit", "did you mean 'test_vit'"), (best.with_name("bset.ckpt"), "no checkpoint at")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            probe_models([best, second], data, shares=[1], progress=progress)


def test_no_worker_outlives_the_features(best, photos, monkeypatch):
    workers = []

    def classify(features, labels, queries, truth, k):
        workers.append(multiprocessing.active_children())
        return truth >= 0

    monkeypatch.setattr("relvit.app.evaluation.trust.feature_probes.knn_right", classify)
    probe_models([best], ImageFolderData(str(photos), num_workers=1), shares=[1])
    assert workers == [[]]


@pytest.mark.slow
def test_timm_models_beside_a_checkpoint(best, photos, tmp_path, capsys, fails):
    path = str(best)
    arguments = ["--shares", "0.5", "1", "--random", f"--output={tmp_path / 'p.json'}"]
    assert main(["probe", path, "test_vit", "--root", str(photos), "--split=test", *arguments]) == 0
    rows = json.loads((tmp_path / "p.json").read_text())
    assert [(row["model"], row["share"], row["labels"], row["images"]) for row in rows] == [
        (model, *of_share) for model in (path, "test_vit") for of_share in ((0.5, 9, 18), (1.0, 18, 18))
    ]
    assert [row["features"] for row in rows] == [16, 16, 64, 64]
    # The checkpoint has learned the colours of the classes.
    assert rows[1]["linear"] == 1.0
    assert rows[0]["knn_se"] == pytest.approx(accuracy_error(rows[0]["knn"], 18))
    out = capsys.readouterr().out
    assert re.search(r"\d\.\d{4} ± \d\.\d{4} .*\d\.\d{4} ± \d\.\d{4}", out)
    assert re.search(r"2 minus 1, on the same images, share 1: 20-NN [+-]\d\.\d{4} ± \d\.\d{4}, linear ", out)
    for wrong, message in (
        (["test_vit"], "give --root DIR or --data NAME"),
        (["test_vit", "--root", str(photos), "--data=DigitsData"], "--root and --data both name the images"),
        ([path, "--shares=[0]"], "shares must be in 0 < x <= 1"),
        ([path, "--data=DigitsData"], "takes images of 3 channels, the data have 1"),
        (["tset_vit", "--root", str(photos)], "did you mean 'test_vit'"),
        (["tset_vit"], "did you mean 'test_vit'"),
        ([str(best.parent)], "checkpoints is a folder; give the checkpoint, such as"),
        ([str(best.parent), "--root", str(photos)], "checkpoints is a folder; give the checkpoint, such as"),
        (["relvit_tiny", "--root", str(photos)], "no pretrained weights of relvit_tiny: give --random"),
    ):
        assert message in fails(["probe", *wrong])


def test_unreadable_images_and_small_shares(best, photos, tmp_path, recwarn):
    """Only images of the largest share are read, and unreadable images do not move the results of the other images."""
    root = shutil.copytree(photos, tmp_path / "photos")
    data = ImageFolderData(str(root), num_workers=0, on_error="skip")
    labels = np.repeat([0, 1, 2], 6)
    used, part = choose_labels(labels, 0.5, 0), choose_labels(labels, 0.34, 0)
    for index in {*range(18)} - {*used.tolist()} | {int(part[0])}:
        Path(data.samples("train")[index][0]).write_bytes(b"no image")
    rows = probe_models([best], data, shares=(0.34, 0.5))
    assert [row["labels"] for row in rows] == [5, 8]
    (text,) = [str(warning.message) for warning in recwarn]
    broken = data.samples("train")[part[0]][0]
    assert text.startswith(f"1 image of train could not be read and was left out. The first is {broken}: it is not an")
    # The result is the same as without the unreadable image, whose class has one image left.
    features = relvit.load(best).embed([data.samples("train")[index][0] for index in part[1:]]).numpy()
    queries = relvit.load(best).embed([path for path, _ in data.samples("val")]).numpy()
    assert rows[0]["knn"] == knn_right(features, labels[part[1:]], queries, labels, 20).mean()


def test_one_label_per_class_needs_no_warning(best, tmp_path, recwarn):
    """With few images for each of many classes, scikit-learn warns that the labels may be of a regression."""
    for split in ("train", "val"):
        for number in range(21):
            path = tmp_path / split / f"class {number}" / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
    probe_models([best], ImageFolderData(str(tmp_path), num_workers=0), shares=[0.01, 1])
    assert not [str(warning.message) for warning in recwarn]


def test_size_and_normalisation_are_those_of_the_model(monkeypatch, photos):
    seen = []

    def note(net, images):
        seen.append(images)
        return images.mean((2, 3))

    monkeypatch.setattr("relvit.app.training.base_classifier.pooled_features", note)
    data = ImageFolderData(str(photos), img_size=32, num_workers=0, batch_size=64)
    probe_models("test_vit", data, shares=[1], pretrained=False)
    assert [tuple(images.shape) for images in seen] == [(18, 3, 160, 160)] * 2
    expected = ImageFolderData(str(photos), img_size=160, crop_pct=0.95, mean=(0.5,) * 3, std=(0.5,) * 3)
    torch.testing.assert_close(seen[1], torch.stack([image for image, _ in expected.dataset("val")]))
    # The user's data module is unchanged.
    assert (data.img_size, data.mean[0]) == ((32, 32), 0.485)
    image, _ = data.dataset("val")[0]
    assert torch.equal(image, ImageFolderData(str(photos), img_size=32).dataset("val")[0][0])
