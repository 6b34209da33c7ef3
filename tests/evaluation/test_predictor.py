"""relvit.load: numbers against the checkpoint's classifier image by image, and against `relvit predict`."""

import csv
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from photos import CLASSES, TINY
from PIL import Image

import relvit
from relvit.cli import main
from relvit.data import UnreadableImageError
from relvit.training import load_classifier

MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def best(run):
    return run / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def clf(best):
    return relvit.load(best)


@pytest.fixture(scope="module")
def by_hand(best):
    """Probabilities and features of an image of 17 x 17 pixels, whose 16 x 16 in the middle the model sees."""
    classifier = load_classifier(best)

    def compute(pixels, mirror=False):
        assert pixels.shape == (17, 17, 3)
        # floor(16 / 0.9) = 17: nothing is resized; the crop starts at round((17 - 16) / 2) = 0
        x = (torch.from_numpy(pixels[:16, :16].copy()).float() / 255 - MEAN) / STD
        x = x.permute(2, 0, 1)[None]
        with torch.no_grad():
            features = classifier.net.fc_norm(classifier.net.forward_features(x).mean(1))
            probabilities = classifier(x).softmax(-1)
            if mirror:
                probabilities = (probabilities + classifier(x.flip(-1)).softmax(-1)) / 2
        torch.testing.assert_close(
            classifier.net.head(features).softmax(-1).detach(), classifier(x).softmax(-1).detach()
        )
        return probabilities[0], features[0]

    return compute


def noise(seed):
    return np.random.default_rng(seed).integers(0, 256, (17, 17, 3)).astype(np.uint8)


def check(prediction, probabilities, top=3):
    assert prediction.names == [list(CLASSES)[i] for i in probabilities.argsort(descending=True)[:top]]
    assert prediction.probabilities == pytest.approx(probabilities.sort(descending=True).values[:top].tolist())
    assert (prediction.name, prediction.probability) == (prediction.names[0], prediction.probabilities[0])


def test_one_image_of_each_kind(clf, by_hand, tmp_path):
    pixels = noise(0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    expected, features = by_hand(pixels)
    path = tmp_path / "a.png"
    for image in (path, str(path), Image.fromarray(pixels), pixels, torch.from_numpy(pixels).permute(2, 0, 1)):
        check(clf.predict(image), expected)
        torch.testing.assert_close(clf.embed(image), features[None])
    assert clf.predict(path).path == str(path)
    assert clf.predict(pixels).path is None
    check(clf.predict(path, top=2), expected, top=2)


def test_several_images_keep_their_order_in_batches_of_any_size(clf, by_hand, tmp_path):
    arrays = [noise(seed) for seed in range(5)]
    Image.fromarray(arrays[1]).save(tmp_path / "b.png")
    images = [arrays[0], tmp_path / "b.png", Image.fromarray(arrays[2]), *arrays[3:]]
    expected = [by_hand(pixels) for pixels in arrays]
    for several in (images, tuple(images), np.stack(arrays), torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)):
        for batch_size in (2, 32):
            found = clf.predict(several, batch_size=batch_size)
            for prediction, (probabilities, _) in zip(found, expected, strict=True):
                check(prediction, probabilities)
            features = clf.embed(several, batch_size=batch_size)
            torch.testing.assert_close(features, torch.stack([features for _, features in expected]))
    assert features.dtype == torch.float32
    assert features.shape == (5, clf.num_features)
    assert clf.predict([]) == []
    assert clf.embed([]).shape == (0, clf.num_features)
    # a list of one stays a list
    assert [prediction.names for prediction in clf.predict(arrays[:1])] == [clf.predict(arrays[0]).names]


def test_workers_read_the_same(clf, photos):
    assert clf.predict(photos / "test", num_workers=1) == clf.predict(photos / "test")


def test_mirrored_images_are_averaged(clf, by_hand):
    pixels = noise(0)
    check(clf.predict(pixels, mirror=True), by_hand(pixels, mirror=True)[0])
    assert clf.predict(pixels, mirror=True).probabilities != pytest.approx(clf.predict(pixels).probabilities)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("size", [None, "24", "[24,40]"])
def test_a_folder_gives_what_the_command_writes(best, photos, tmp_path, size, mirror):
    arguments = ["predict", f"--ckpt_path={best}", f"--data.root={photos}", f"--runs={tmp_path}"]
    arguments += [] if size is None else [f"--data.img_size={size}"]
    arguments += ["--mirror=true"] if mirror else []
    assert main([*arguments, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]) == 0
    (folder,) = tmp_path.iterdir()
    with open(folder / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    clf = relvit.load(best, img_size=None if size is None else eval(size))
    found = clf.predict(photos / "test", batch_size=5, mirror=mirror)
    assert len(found) == 18
    for prediction, row in zip(found, rows, strict=True):
        assert prediction.path == row["path"]
        assert prediction.names == [row[f"class{place}"] for place in ("", "2", "3")]
        written = [float(row[f"probability{place}"]) for place in ("", "2", "3")]
        assert prediction.probabilities == pytest.approx(written, abs=2e-6)


def test_grey_models_take_colour(digits_run):
    clf = relvit.load(digits_run / "checkpoints" / "best.ckpt")
    grey = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    x = (torch.from_numpy(grey).float() / 255 - 0.3049319887) / 0.3756725775
    with torch.no_grad():
        expected = clf.classifier(x[None, None]).softmax(-1)[0]
    # equal channels are this grey, exactly
    for image in (grey, np.repeat(grey[..., None], 3, -1)):
        found = clf.predict(image, top=10)
        assert dict(zip(found.names, found.probabilities, strict=True)) == pytest.approx(
            dict(zip(clf.class_names, expected.tolist(), strict=True))
        )
    assert len(clf.predict(grey).names) == 5


def test_averaged_weights_are_used(photos, tmp_path):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *TINY]
    assert main([*arguments, "--trainer.max_epochs=2", "--model.ema_decay=0.9", "--model.warmup_epochs=0"]) == 0
    (folder,) = tmp_path.iterdir()
    path = folder / "checkpoints" / "last.ckpt"
    raw = torch.load(path, weights_only=True)
    used = relvit.load(path).classifier.state_dict()["net.head.weight"]
    assert torch.equal(used, raw["ema_state_dict"]["net.head.weight"])
    assert not torch.equal(used, raw["state_dict"]["net.head.weight"])


@pytest.fixture
def broken(photos, tmp_path):
    """A folder of six images of which two cannot be read, and its files in order."""
    root = shutil.copytree(photos / "test" / "cat", tmp_path / "cat")
    (root / "1.jpg").write_bytes(b"nothing")
    whole = (root / "4.jpg").read_bytes()
    (root / "4.jpg").write_bytes(whole[:-40])
    return root, [root / f"{i}.jpg" for i in range(6)]


def warned(caught, total):
    """The one warning, at this file's line."""
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert re.fullmatch(rf"2 of {total} images could not be read; the first: \S*1.jpg: it is not an image.*", text)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_ones_keep_their_places_in_a_list(clf, broken, workers):
    _, files = broken
    good = [files[i] for i in (0, 2, 3, 5)]
    expected, features = clf.predict(good), clf.embed(good)
    pixels = noise(0)
    with pytest.warns(UserWarning, match="could not be read") as caught:
        found = clf.predict([*files, pixels], batch_size=2, num_workers=workers, on_error="skip")
    warned(caught, 7)
    assert [found[1], found[4]] == [None, None]
    for prediction, right in zip((found[i] for i in (0, 2, 3, 5, 6)), [*expected, clf.predict(pixels)], strict=True):
        assert (prediction.path, prediction.names) == (right.path, right.names)
        assert prediction.probabilities == pytest.approx(right.probabilities, rel=1e-5)
    with pytest.warns(UserWarning, match="could not be read") as caught:
        rows = clf.embed([*files, pixels], batch_size=2, num_workers=workers, on_error="skip")
    warned(caught, 7)
    torch.testing.assert_close(rows[[0, 2, 3, 5, 6]], torch.cat((features, clf.embed(pixels))))
    assert rows[[1, 4]].isnan().all()


def test_of_a_folder_predictions_are_left_out_and_features_keep_their_places(clf, broken):
    root, files = broken
    with pytest.warns(UserWarning, match="could not be read") as caught:
        found = clf.predict(root, on_error="skip")
    warned(caught, 6)
    assert found == clf.predict([files[i] for i in (0, 2, 3, 5)])
    with pytest.warns(UserWarning, match="could not be read") as caught:
        rows = clf.embed(root, on_error="skip")
    warned(caught, 6)
    torch.testing.assert_close(rows[[0, 2, 3, 5]], clf.embed([files[i] for i in (0, 2, 3, 5)]))
    assert rows.isnan().all(1).tolist() == [False, True, False, False, True, False]


def test_nothing_readable_and_nothing_unreadable(clf, broken, recwarn):
    root, files = broken
    assert clf.predict(files[:1], on_error="skip") == clf.predict(files[:1])
    assert clf.predict([], on_error="skip") == []
    assert not recwarn
    with pytest.warns(UserWarning, match="1 of 1 images could not be read"):
        assert clf.predict(files[1], on_error="skip") is None
    with pytest.warns(UserWarning, match="2 of 2 images"):
        # one file twice is two images
        assert clf.predict([files[1], files[1]], on_error="skip") == [None, None]
    # a PIL image decodes its file when its pixels are asked for
    with pytest.warns(UserWarning, match=r"1 of 2 images could not be read; the first: \S*4.jpg: .*truncated"):
        assert clf.predict([Image.open(files[4]), files[0]], on_error="skip")[0] is None
    with pytest.raises(UnreadableImageError, match=r"4\.jpg"):
        clf.predict(root / "4.jpg")
    # what is no image at all is a mistake of the caller
    with pytest.raises(TypeError, match="got int"):
        clf.predict([files[0], 3], on_error="skip")
    for run in (clf.predict, clf.embed):
        with pytest.raises(ValueError, match=r"on_error is 'skp'; allowed are 'error', 'skip' \(did you mean 'skip'"):
            run(files[0], on_error="skp")


def test_a_checkpoint_is_read_once(best, monkeypatch):
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **kwargs: read.append(path) or load(path, **kwargs))
    relvit.load(best)
    assert read == [best]


def test_features_may_be_trained_on(clf):
    features = clf.embed([noise(0), noise(1)])
    probe = torch.nn.Linear(clf.num_features, 2)
    probe(features).sum().backward()
    torch.testing.assert_close(probe.weight.grad, features.sum(0).expand(2, -1))


def test_what_it_says_of_itself(clf):
    assert clf.class_names == list(CLASSES)
    assert clf.img_size == (16, 16)
    assert clf.to("cpu") is clf
    assert clf.device == torch.device("cpu")
    assert repr(clf) == "Predictor(test_relvit, 3 classes, 16 x 16 px, on cpu)"
    assert not clf.classifier.training


def test_mistakes(clf, best, photos, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    with pytest.raises(UnreadableImageError, match=r"cannot read image .*broken\.jpg: it is not an image"):
        clf.predict([photos / "test" / "cat" / "0.jpg", tmp_path / "broken.jpg"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no image below .*empty"):
        clf.predict(tmp_path / "empty")
    with pytest.raises(TypeError, match="got dict"):
        clf.embed({})
    with pytest.raises(ValueError, match="top is 0"):
        clf.predict(noise(0), top=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        clf.predict(noise(0), batch_size=0)
    with pytest.raises(ValueError, match="num_workers is -1"):
        clf.embed(noise(0), num_workers=-1)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at none\.ckpt"):
        relvit.load("none.ckpt")
    with pytest.raises(ValueError, match="img_size is 0"):
        relvit.load(best, img_size=0)
    with pytest.raises(ValueError, match="image height 20 is not a multiple of the patch size 8: use 16 or 24"):
        relvit.load(best, img_size=20).predict(noise(0))


def test_importing_relvit_stays_light():
    heavy = ("lightning", "torchmetrics", "matplotlib", "sklearn", "jsonargparse")
    code = f"import sys, relvit; relvit.load; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
