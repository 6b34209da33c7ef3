"""relvit.load: results compared with the checkpoint's classifier image by image, and with `relvit predict`."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import QUIET, only, rows
from photos import CLASSES
from PIL import Image

import relvit
from relvit.app.cli import main
from relvit.app.data import UnreadableImageError
from relvit.app.evaluation import embed_folder
from relvit.app.training import load_classifier

MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def clf(best):
    return relvit.load(best)


@pytest.fixture(scope="module")
def by_hand(best):
    """Compute probabilities and features of an image of 17 x 17 pixels, of which the model sees the crop of 16 x 16."""
    classifier = load_classifier(best)

    def compute(pixels, mirror=False):
        assert pixels.shape == (17, 17, 3)
        # floor(16 / 0.9) = 17, so nothing is resized; the crop starts at round((17 - 16) / 2) = 0.
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
    mirrored = clf.predict(pixels, mirror=True)
    check(mirrored, by_hand(pixels, mirror=True)[0])
    assert mirrored.probabilities != pytest.approx(clf.predict(pixels).probabilities)


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
    # An iterable, such as a column of paths in a table, is as good as a list.
    paths = np.array([str(tmp_path / "b.png")] * 2)
    for column in (paths, iter(paths)):
        assert [prediction.names for prediction in clf.predict(column)] == [clf.predict(arrays[1]).names] * 2
    assert clf.predict([]) == []
    assert clf.embed([]).shape == (0, clf.num_features)
    # For a list of one image the result is a list.
    assert [prediction.names for prediction in clf.predict(arrays[:1])] == [clf.predict(arrays[0]).names]


def test_a_folder_gives_what_the_command_writes(best, photos, tmp_path):
    options = [f"--data.root={photos}", f"--runs={tmp_path}", "--data.img_size=[24,40]", "--mirror=true", *QUIET]
    assert main(["predict", str(best), *options]) == 0
    found = relvit.load(best, img_size=(24, 40)).predict(photos / "test", batch_size=5, mirror=True)
    assert len(found) == 18
    for prediction, row in zip(found, rows(only(tmp_path) / "predictions.csv"), strict=True):
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
    # Colour images with three equal channels become exactly this grey.
    for image in (grey, np.repeat(grey[..., None], 3, -1)):
        found = clf.predict(image, top=10)
        assert dict(zip(found.names, found.probabilities, strict=True)) == pytest.approx(
            dict(zip(clf.class_names, expected.tolist(), strict=True))
        )
    assert len(clf.predict(grey).names) == 5


def test_averaged_weights_are_used_and_the_file_is_read_once(best, tmp_path, monkeypatch):
    content = torch.load(best, weights_only=True)
    content["ema_state_dict"] = {"net.head.bias": torch.arange(3.0)}
    torch.save(content, tmp_path / "x.ckpt")
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **kwargs: read.append(path) or load(path, **kwargs))
    assert relvit.load(tmp_path / "x.ckpt").model.head.bias.tolist() == [0, 1, 2]
    assert read == [tmp_path / "x.ckpt"]


@pytest.fixture
def broken(photos, tmp_path):
    """A folder of six images of which two cannot be read, and the files in order."""
    root = shutil.copytree(photos / "test" / "cat", tmp_path / "cat")
    (root / "1.jpg").write_bytes(b"nothing")
    content = (root / "4.jpg").read_bytes()
    (root / "4.jpg").write_bytes(content[:-40])
    return root, [root / f"{i}.jpg" for i in range(6)]


def skipping(function, images, **options):
    """Return the result, and check that there is one warning, which names the line of the call."""
    with pytest.warns(UserWarning, match="could not be read") as caught:
        found = function(images, on_error="skip", **options)
    # Python 3.12 also warns of workers that begin in a process of several threads.
    (warning,) = [each for each in caught if each.category is UserWarning]
    assert warning.filename == __file__
    total = len(images) if isinstance(images, list) else 6
    first = rf"2 of {total} images could not be read; the first: \S*1.jpg: it is not an image.*"
    assert re.fullmatch(first, str(warning.message))
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_of_a_list_and_of_a_folder(clf, broken, workers):
    """Results for a list, and all features, keep their places; predictions for a folder leave the images out."""
    root, files = broken
    images, good, options = [*files, noise(0)], [0, 2, 3, 5, 6], {"batch_size": 2, "num_workers": workers}
    found, expected = skipping(clf.predict, images, **options), [clf.predict(images[i]) for i in good]
    assert [found[1], found[4]] == [None, None]
    for prediction, right in zip((found[i] for i in good), expected, strict=True):
        assert (prediction.path, prediction.names) == (right.path, right.names)
        assert prediction.probabilities == pytest.approx(right.probabilities, rel=1e-5)
    assert skipping(clf.predict, root, **options) == [found[i] for i in good[:-1]]
    for given, kept in ((images, good), (root, good[:-1])):
        rows = skipping(clf.embed, given, **options)
        torch.testing.assert_close(rows[kept], clf.embed([images[i] for i in kept]))
        assert rows.isnan().all(1).nonzero().flatten().tolist() == [1, 4]


def test_unreadable_images_alone_and_images_of_other_kinds(clf, broken, recwarn):
    root, files = broken
    assert clf.predict(files[:1], on_error="skip") == clf.predict(files[:1])
    assert not recwarn
    with pytest.warns(UserWarning, match="1 of 1 image could not be read"):
        assert clf.predict(files[1], on_error="skip") is None
    # A PIL image decodes its file only when its pixels are read.
    with pytest.warns(UserWarning, match=r"1 of 2 images could not be read; the first: \S*4.jpg: .*truncated"):
        assert clf.predict([Image.open(files[4]), files[0]], on_error="skip")[0] is None
    for call, given, options, error, message in (
        (clf.predict, root / "4.jpg", {}, UnreadableImageError, r"4\.jpg"),
        # For a list, the error names the first unreadable image.
        (clf.predict, files, {"on_error": "error", "batch_size": 2}, UnreadableImageError, r"1\.jpg"),
        (clf.embed, files, {"on_error": "error", "batch_size": 2}, UnreadableImageError, r"1\.jpg"),
        (clf.attention, files[1], {}, UnreadableImageError, r"1\.jpg"),
        # An object that is not an image is the caller's mistake, so `on_error="skip"` does not skip it.
        (clf.predict, [files[0], 3], {"on_error": "skip"}, TypeError, "got int"),
        (clf.embed, files[0], {"on_error": "skp"}, ValueError, r"on_error is 'skp'.*'skip' \(did you mean 'skip'"),
    ):
        with pytest.raises(error, match=message):
            call(given, **options)


def test_attributes(clf):
    assert clf.class_names == list(CLASSES)
    assert clf.img_size == (16, 16)
    assert clf.to("cpu") is clf
    assert repr(clf) == "Predictor(test_relvit, 3 classes, 16 x 16 px, on cpu)"
    assert not clf.classifier.training
    # A probe can be trained on the features.
    features = clf.embed([noise(0), noise(1)])
    probe = torch.nn.Linear(clf.num_features, 2)
    probe(features).sum().backward()
    torch.testing.assert_close(probe.weight.grad, features.sum(0).expand(2, -1))


@pytest.fixture(params=[torch.bfloat16, torch.float64, torch.device("meta")], ids=str)
def other_default(request):
    """Change PyTorch's default dtype or device, as other code of a user may do."""
    if isinstance(request.param, torch.dtype):
        torch.set_default_dtype(request.param)
    else:
        torch.set_default_device(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def results(predictor, folder):
    """Compute all results of a predictor for an image, and the features of a folder."""
    (pixels, indices), *_ = predictor.batches([noise(0)])
    arrays = pixels, indices, predictor.embed(noise(0)), embed_folder(predictor, folder).features
    return predictor.predict(noise(0)), [np.asarray(array) for array in arrays]


@pytest.fixture(scope="module")
def ordinary(clf, photos):
    return results(clf, photos / "test")


def test_results_do_not_depend_on_pytorchs_defaults(best, clf, photos, ordinary, other_default):
    again = relvit.load(best)
    for predictor in (clf, again, again.at_size((24, 40)).at_size(None)):
        tensors = [*predictor.model.parameters(), *predictor.embed(noise(0)), *predictor.attention(noise(0)).weights]
        assert {(tensor.dtype, tensor.device.type) for tensor in tensors} == {(torch.float32, "cpu")}
        prediction, arrays = results(predictor, photos / "test")
        assert prediction == ordinary[0]
        for found, expected in zip(arrays, ordinary[1], strict=True):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
    # The user's default dtype and device are unchanged.
    assert other_default in (torch.ones(1).dtype, torch.ones(1).device)


@pytest.mark.filterwarnings("ignore:1 of 2 images could not be read")
def test_random_numbers_of_the_user_do_not_change(best, photos, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"nothing")
    before = torch.get_rng_state()
    clf = relvit.load(best)
    clf.predict([noise(0), tmp_path / "broken.png"], on_error="skip")
    clf.predict([noise(0), noise(1)], num_workers=1)
    clf.at_size((24, 40)).embed(noise(0))
    clf.attention(noise(0))
    embed_folder(clf, photos / "test")
    assert torch.equal(torch.get_rng_state(), before)


def test_another_size_of_the_same_model(best):
    clf = relvit.load(best)
    own = clf.at_size(None)
    own.transform = by_user = own.at_size((24, 40)).transform
    assert own.at_size(16).transform is by_user
    with pytest.warns(UserWarning, match="the predictor of another size has the transform of the training again"):
        assert own.at_size((24, 40)).transform is not by_user
    other = clf.at_size((24, 40))
    assert (other.img_size, clf.img_size, other.at_size(None).img_size) == ((24, 40), (16, 16), (16, 16))
    assert other.model is clf.model
    for size, found in (((24, 40), other), ((16, 16), clf)):
        again = relvit.load(best, size)
        assert found.predict(noise(0)) == again.predict(noise(0))
        # The description has the size in training, and no entries about timm's own weights.
        assert again.model.default_cfg == again.model.pretrained_cfg == clf.model.pretrained_cfg
    assert clf.model.pretrained_cfg["input_size"] == (3, 16, 16)
    assert not clf.model.pretrained_cfg.keys() & {"url", "hf_hub_id", "file", "tag", "test_input_size", "label_offset"}
    with pytest.raises(ValueError, match="image height 20 is not a multiple of the patch size 8"):
        clf.at_size(20)


def test_attention_of_one_image_at_any_size(best, photos):
    clf = relvit.load(best, (24, 40))
    path = photos / "test" / "owl" / "0.jpg"
    expected = relvit.attention_maps(clf.model, clf.transform(Image.open(path))[None])
    for given in (path, Image.open(path), np.asarray(Image.open(path))):
        maps = clf.attention(given)
        assert (maps.grid, maps.prefix, len(maps.weights)) == ((3, 5), 0, 2)
        for weights, want in zip(maps.weights, expected.weights, strict=True):
            assert (weights.dtype, weights.shape) == (torch.float32, (2, 15, 15))
            torch.testing.assert_close(weights, want[0])
    (last,) = clf.attention(path, layers=[-1]).weights
    torch.testing.assert_close(last, maps.weights[1])
    with pytest.raises(TypeError, match="attention takes one image, got 6 of them: give one after the other"):
        clf.attention(photos / "test" / "owl")
    with pytest.raises(TypeError, match="one image, got 1 of them"):
        clf.attention([path])


def test_mistakes(clf, best, tmp_path):
    (tmp_path / "empty").mkdir()
    for call, message in (
        (lambda: clf.predict(tmp_path / "empty"), r"no image below .*empty"),
        (lambda: clf.predict(noise(0), top=0), "top is 0"),
        (lambda: clf.predict(noise(0), batch_size=0), "batch_size"),
        (lambda: clf.embed(noise(0), num_workers=-1), "num_workers"),
        (lambda: relvit.load(best, img_size=0), "img_size is 0"),
        (lambda: relvit.load(best, img_size=20), "image height 20 is not a multiple of the patch size 8: use 16 or 24"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at none\.ckpt"):
        relvit.load("none.ckpt")


def test_a_name_that_is_no_checkpoint_says_what_it_may_be(best, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("best.ckpt").write_bytes(b"")
    Path("my_model").mkdir()
    Path("my_model/config.json").write_text('{"architecture": "test_vit"}')
    Path("of_transformers").mkdir()
    Path("of_transformers/config.json").write_text('{"architectures": ["SamModel"]}')
    Path("runs/2026_small/checkpoints").mkdir(parents=True)
    Path("runs/2026_small/checkpoints/best.ckpt").write_bytes(b"")
    Path("first/checkpoints").mkdir(parents=True)
    Path("first/checkpoints/last.ckpt").write_bytes(b"")
    for name, message in (
        ("bset.ckpt", "did you mean 'best.ckpt'?"),
        ("vit_smal_patch16_224", "did you mean 'vit_small_patch16_224'?"),
        ("relvit_tiny", "timm.create_model('relvit_tiny', pretrained=True) makes the model of this name"),
        ("hf-hub:me/owls", "timm.create_model('hf-hub:me/owls', pretrained=True)"),
        ("my_model", "timm.create_model('local-dir:my_model', pretrained=True) loads what is published"),
        ("runs", "give the checkpoint, such as runs/2026_small/checkpoints/best.ckpt"),
        ("runs/2026_small/checkpoints", "such as runs/2026_small/checkpoints/best.ckpt"),
        ("first", "such as first/checkpoints/last.ckpt"),
        ("first/checkpoints", "such as first/checkpoints/last.ckpt"),
    ):
        with pytest.raises(FileNotFoundError, match=re.escape(message)):
            relvit.load(name)
    with pytest.raises(
        FileNotFoundError, match=r"without a \.ckpt; give one, such as runs/RUN/checkpoints/best\.ckpt$"
    ):
        relvit.load("of_transformers")


@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_a_stop_iteration_of_the_transform_is_an_error(best, on_error):
    """Otherwise the images from this one on would silently have no predictions."""
    clf = relvit.load(best)
    clf.transform = lambda image: next(iter(()))
    with pytest.raises(RuntimeError, match="item 0 of InputImages raises StopIteration"):
        clf.predict([noise(0)], on_error=on_error)
