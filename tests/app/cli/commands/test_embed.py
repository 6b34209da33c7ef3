"""`relvit embed`: every format against features computed image by image."""

import csv
import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from photos import CLASSES
from PIL import Image
from pyarrow import parquet
from small_training import train_and_save

import relvit
from relvit.app.cli import main
from relvit.app.data import ImageFolderData
from relvit.app.evaluation import Embeddings, write_embeddings
from relvit.app.training import ImageClassifier, load_classifier


def embed(best, root, output, *arguments):
    return main(["embed", str(best), f"--root={root}", f"--output={output}", "--num_workers=0", *arguments])


def by_hand(best, paths, size=16):
    """Compute the pooled features, from which the head computes the logits."""
    classifier = load_classifier(best)
    transform = ImageFolderData(".", img_size=size, class_names=list(CLASSES)).eval_transform
    found = []
    with torch.no_grad():
        for path in paths:
            image = transform(Image.open(path).convert("RGB"))[None]
            features = classifier.net.fc_norm(classifier.net.forward_features(image).mean(1))
            torch.testing.assert_close(classifier.net.head(features), classifier(image))
            found.append(features[0])
    return torch.stack(found).numpy()


def read(output):
    """Return the paths, classes and features in a file."""
    if output.suffix == ".npz":
        content = np.load(output)
        return content["path"].tolist(), content["class"].tolist(), content["features"]
    if output.suffix == ".csv":
        with open(output, newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["path", "class", *map(str, range(len(header) - 2))]
        return [r[0] for r in rows], [r[1] for r in rows], np.array([r[2:] for r in rows], np.float32)
    table = parquet.read_table(output)
    return table["path"].to_pylist(), table["class"].to_pylist(), np.array(table["features"].to_pylist(), np.float32)


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_formats(best, photos, tmp_path, suffix, capsys):
    output = tmp_path / f"e.{suffix}"
    assert embed(best, photos / "test", output, "--batch_size=5") == 0
    paths, classes, features = read(output)
    assert paths == [f"{photos}/test/{name}/{i}.jpg" for name in CLASSES for i in range(6)]
    assert classes == [name for name in CLASSES for _ in range(6)]
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, by_hand(best, paths), rtol=1e-5, atol=1e-6)
    out, err = capsys.readouterr()
    assert f"18 images, 16 features each, in {output}" in out
    assert "4/4" in err


def test_a_csv_is_written_a_row_at_a_time(tmp_path):
    """As numbers of Python, the features of a million images take tens of gigabytes."""
    sizes = []

    class Features(np.ndarray):
        def tolist(self):
            sizes.append(self.size)
            return super().tolist()

    found = Embeddings(["a", "b", "c"], [""] * 3, np.ones((3, 4), np.float32).view(Features), {})
    write_embeddings(found, tmp_path / "e.csv")
    assert (tmp_path / "e.csv").read_text().splitlines()[3] == "c,1,1,1,1"
    assert sizes == [4, 4, 4]


def test_splits_are_no_classes_and_other_sizes(best, photos, tmp_path):
    root = tmp_path / "photos"
    for split in ("train", "test"):
        shutil.copytree(photos / split, root / split)
    shutil.copytree(photos / "val" / "cat", root / "val" / "cat" / "deeper")
    shutil.copy(photos / "val" / "owl" / "0.jpg", root / "loose.jpg")
    assert embed(best, root, tmp_path / "e.npz", "--img_size=[24,32]") == 0
    paths, classes, features = read(tmp_path / "e.npz")
    assert len(paths) == 18 + 18 + 6 + 1
    # The root folder has a name, too, but an image directly in it has no class.
    expected = ["" if "loose" in path else re.search(r"photos/\w+/(\w+)/", path)[1] for path in paths]
    assert classes == expected
    np.testing.assert_allclose(features, by_hand(best, paths, (24, 32)), rtol=1e-5, atol=1e-6)


def test_without_class_folders_and_past_broken_files(best, photos, tmp_path, capsys):
    root = shutil.copytree(photos / "test" / "cat", tmp_path / "flat")
    (root / "1.jpg").write_bytes(b"nothing")
    (root / "4.jpg").write_bytes(b"")
    assert embed(best, root, tmp_path / "new" / "e.npz", "--batch_size=2") == 0
    content = np.load(tmp_path / "new" / "e.npz")
    assert sorted(content) == ["features", "path"]
    assert content["path"].tolist() == [f"{root}/{i}.jpg" for i in (0, 2, 3, 5)]
    np.testing.assert_allclose(content["features"], by_hand(best, content["path"]), rtol=1e-5, atol=1e-6)
    listed = (tmp_path / "new" / "e.unreadable.csv").read_text().splitlines()
    assert listed == [
        "path,reason",
        f'{root}/1.jpg,"it is not an image, or of an unknown format"',
        f"{root}/4.jpg,the file is empty (zero bytes)",
    ]
    assert (
        f"2 images could not be read and were left out. {tmp_path / 'new' / 'e.unreadable.csv'} says why"
        in capsys.readouterr().out
    )
    for name in ("1.jpg", "4.jpg"):
        shutil.copy(root / "0.jpg", root / name)
    assert embed(best, root, tmp_path / "new" / "e.npz") == 0
    # The older list must not seem to be about the new features.
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["e.npz"]
    for path in root.iterdir():
        path.write_bytes(b"")
    assert embed(best, root, tmp_path / "none.npz") == 2
    printed = capsys.readouterr()
    assert f"error: none of the images could be read; the first: {root}/0.jpg: the file is empty" in printed.err
    assert (printed.out + printed.err).count("none.unreadable.csv") == 1
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_a_class_whose_name_is_not_utf8(best, photos, tmp_path, suffix):
    folder = os.fsencode(tmp_path / "photos") + b"/caf\xe9"
    os.makedirs(folder)
    shutil.copy(photos / "test" / "cat" / "0.jpg", os.fsdecode(folder))
    assert embed(best, tmp_path / "photos", tmp_path / f"e.{suffix}") == 0
    paths, classes, _ = read(tmp_path / f"e.{suffix}")
    assert (paths, classes) == ([rf"{tmp_path}/photos/caf\xe9/0.jpg"], [r"caf\xe9"])


@pytest.mark.parametrize(
    ("model", "arguments"), [("test_mambaout", None), ("test_resnet", {"global_pool": "catavgmax"})]
)
def test_a_classifier_with_a_layer_or_pooling_before_its_last_layer(model, arguments, photos, tmp_path):
    """The features have another length than timm's `num_features`, the length before the pooling."""
    train_and_save(tmp_path / "a.ckpt", ImageClassifier(model, 7, 3, (64, 64), model_kwargs=arguments), fast_dev_run=1)
    clf = relvit.load(tmp_path / "a.ckpt")
    assert embed(tmp_path / "a.ckpt", photos / "test" / "cat", tmp_path / "e.npz") == 0
    features = np.load(tmp_path / "e.npz")["features"]
    paths = sorted((photos / "test" / "cat").iterdir())
    found = clf.embed(paths)
    np.testing.assert_allclose(features, found, rtol=1e-5, atol=1e-6)
    assert found.shape == (6, clf.num_features)
    assert clf.num_features != clf.model.num_features
    logits = clf.model.get_classifier()(found)
    probabilities = [prediction.probability for prediction in clf.predict(paths)]
    np.testing.assert_allclose(logits.softmax(1).amax(1).detach(), probabilities, rtol=1e-5)


def test_mistakes(best, photos, tmp_path, monkeypatch, fails):
    def message(*arguments, root=photos, output=tmp_path / "e.npz"):
        return fails(["embed", best, f"--root={root}", f"--output={output}", *arguments])

    wrong = "ends in '.parket'; allowed are .npz, .csv, .parquet (did you mean '.parquet'?)"
    assert wrong in message(output=tmp_path / "e.parket")
    named = "give a file whose name ends in .npz or .csv or .parquet"
    assert f"output {tmp_path} is a folder: {named}" in message(output=tmp_path)
    assert f"features is a name without an ending: {named}" in message(output=tmp_path / "features")
    assert "root nowhere is not a folder" in message(root="nowhere")
    (tmp_path / "empty").mkdir()
    assert f"no image below {tmp_path / 'empty'}" in message(root=tmp_path / "empty")
    for name in ("val", "valid"):
        shutil.copytree(photos / "val", tmp_path / "photos" / name)
    with monkeypatch.context() as patch:
        patch.setattr("relvit.app.evaluation.predictor.Predictor.features", None)
        assert "both hold validation images; keep one" in message(root=tmp_path / "photos")
    assert "device is 'gpu9', which PyTorch does not know" in message("--device=gpu9")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    package = 'a Parquet file needs the package pyarrow: pip install "relvit[parquet]"'
    assert package in message(output=tmp_path / "e.parquet")
