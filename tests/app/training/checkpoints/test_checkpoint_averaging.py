"""The mean of checkpoints compared with NumPy, tensor by tensor, and checkpoints that cannot be averaged."""

import contextlib
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from small_training import KWARGS, NAMES, NoiseImages, build, train, train_and_save

from relvit.app.training import Checkpoint, ImageClassifier, average_checkpoints
from relvit.app.training.checkpoints.checkpoint import first_difference
from relvit.app.training.checkpoints.file import AVERAGE_KEY


def trained(path, model="test_relvit", kwargs=KWARGS, epochs=1, **options):
    """Train a little and return the content of the checkpoint."""
    torch.manual_seed(0)
    module = ImageClassifier(model, 7, 3, (8, 12), NAMES, kwargs, warmup_epochs=0, lr=0.01, **options)
    train_and_save(path, module, NoiseImages(4), max_epochs=epochs)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Paths and contents of three checkpoints: the second has averaged weights, the third another training."""
    folder = tmp_path_factory.mktemp("three")
    options = ({}, {"ema_decay": 0.5, "epochs": 2}, {"label_smoothing": 0.0, "opt": "sgd", "epochs": 2})
    paths = [folder / f"{name}.ckpt" for name in "abc"]
    return paths, [trained(path, **kwargs) for path, kwargs in zip(paths, options, strict=True)]


def used(content):
    """Return the weights with which a checkpoint is evaluated."""
    return content.get(AVERAGE_KEY, content["state_dict"])


def test_every_weight_is_the_mean_of_those_that_are_evaluated(three, tmp_path):
    paths, contents = three
    assert not torch.equal(contents[1]["state_dict"]["net.head.weight"], used(contents[1])["net.head.weight"])
    average_checkpoints(paths, str(tmp_path / "mean.ckpt"))
    content = torch.load(tmp_path / "mean.ckpt", weights_only=True)
    assert list(content["state_dict"]) == list(contents[0]["state_dict"])
    for name, tensor in content["state_dict"].items():
        columns = [used(other)[name].numpy().astype(np.float64) for other in contents]
        expected = np.mean(columns, axis=0).astype(np.float32)
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), expected, err_msg=name)
    assert set(content) == {"state_dict", "state_dict_ema", "relvit", "pytorch-lightning_version"}
    record = content["relvit"]
    assert record["average_of"] == {str(path): [] for path in paths}
    # The description has the network and the data, but no options of a training.
    known = ("model", "model_kwargs", "num_classes", "in_chans", "img_size", "class_names", "retrofit", "multi_label")
    assert record["model"] == {name: contents[0]["relvit"]["model"][name] for name in known}
    assert record["data"] == contents[0]["relvit"]["data"]


def test_no_training_resumes_from_a_mean(three, tmp_path):
    average_checkpoints(three[0], tmp_path / "mean.ckpt")
    with pytest.raises(ValueError, match=r"holds only weights .*: start a training from these weights with pretrained"):
        train(build(warmup_epochs=0), ckpt_path=tmp_path / "mean.ckpt", max_epochs=1)


def test_sums_are_taken_in_float64_and_dtypes_kept(three, tmp_path):
    # Sums in the tensors' own dtypes would be wrong: in float32 1e8 + 1 is 1e8, in bfloat16 256 + 1 + 1 is 256.
    for path, value, rough in zip("pqr", (1e8, 1.0, -1e8), (256.0, 1.0, 1.0), strict=True):
        content = torch.load(three[0][0], weights_only=True)
        content["state_dict"]["net.fc_norm.bias"].fill_(value)
        content["state_dict"]["net.head.bias"] = torch.full((7,), rough, dtype=torch.bfloat16)
        torch.save(content, tmp_path / path)
    average_checkpoints([tmp_path / path for path in "pqr"], tmp_path / "mean.ckpt")
    found = torch.load(tmp_path / "mean.ckpt", weights_only=True)["state_dict"]
    assert found["net.fc_norm.bias"].tolist() == [float(np.float32(1 / 3))] * 8
    assert (found["net.head.bias"].dtype, found["net.head.bias"].tolist()) == (torch.bfloat16, [86.0] * 7)


def test_buffers_must_be_the_same(tmp_path):
    content = trained(tmp_path / "a.ckpt", "test_resnet", None)
    paths = [tmp_path / "a.ckpt", tmp_path / "b.ckpt"]
    content["state_dict"]["net.fc.weight"] += 2
    torch.save(content, paths[1])
    average_checkpoints(paths, tmp_path / "mean.ckpt")
    counter = "net.bn1.num_batches_tracked"
    found = torch.load(tmp_path / "mean.ckpt", weights_only=True)["state_dict"]
    assert (found[counter].dtype, found[counter].item()) == (torch.int64, 1)
    torch.testing.assert_close(found["net.fc.weight"], content["state_dict"]["net.fc.weight"] - 1)
    for name in (counter, "net.bn1.running_mean"):
        other = torch.load(paths[0], weights_only=True)
        other["state_dict"][name] += 1
        torch.save(other, paths[1])
        with pytest.raises(
            ValueError, match=rf"{name} is a buffer.* differs between .*b.ckpt and .*a.ckpt: buffers cannot be averaged"
        ):
            average_checkpoints(paths, tmp_path / "other.ckpt")


def put(*keys):
    *keys, value = keys

    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


HEAD, MODEL, IMAGES = ("state_dict", "net.head.weight"), ("relvit", "model"), ("relvit", "images")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put(*MODEL, "model", "test_vit"),
            "q.ckpt .* model 'test_vit', .*p.ckpt with 'test_r.* be averaged: leave one ",
        ),
        (put(*MODEL, "model_kwargs", "depth", 3), "model_kwargs {'depth': 3}, .* {'depth': 1}"),
        (put(*MODEL, "retrofit", {}), "retrofit {}, .* None"),
        (put(*MODEL, "class_names", NAMES[::-1]), r"class_names \['class 6', .* \['class 0'"),
        (put(*IMAGES, "img_size", [12, 8]), r"img_size \[12, 8\], .* \[8, 12\]"),
        (put(*IMAGES, "mean", [0.5, 0.4, 0.5]), r"mean \[0.5, 0.4, 0.5\], .* \[0.5, 0.5, 0.5\]"),
        (put(*IMAGES, "std", [1.0] * 3), r"std \[1.0, 1.0, 1.0\], .* \[0.5, 0.5, 0.5\]"),
        (put(*IMAGES, "crop_pct", 0.9), "crop_pct 0.9, .* 1.0"),
        (put(*IMAGES, "native", True), "images 'native shapes of up to .* '8 x 12 px'"),
        (put(*HEAD, torch.zeros(7, 9)), r"head.weight .*\(7, 9\) in .*q.ckpt, .*\(7, 8\)"),
        (put(*HEAD, torch.zeros(7, 8).half()), "head.weight .*float16 .*q.ckpt, .*float32"),
        (put(*HEAD, torch.full((7, 8), torch.nan)), "q.ckpt .* net.head.weight"),
        (
            put("state_dict", "net.more", torch.zeros(1)),
            "only .*q.ckpt has 'net.more': average checkpoints of one model",
        ),
        (lambda content: content["state_dict"].pop("net.head.bias"), "only .*p.ckpt has 'net.head.bias'"),
        # The folder of the images and the options of the training may differ.
        (put("relvit", "data", "init_args", "root", "elsewhere"), None),
        (put(*MODEL, "lr", 1.0), None),
    ],
)
def test_what_has_a_mean(change, message, three, tmp_path):
    paths = [tmp_path / "p.ckpt", tmp_path / "q.ckpt"]
    content = torch.load(three[0][0], weights_only=True)
    torch.save(content, paths[0])
    change(content)
    torch.save(content, paths[1])
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        average_checkpoints(paths, tmp_path / "mean.ckpt")
    assert (tmp_path / "mean.ckpt").exists() == (message is None)


def test_the_weights_from_which_all_trainings_started_are_kept(three, tmp_path):
    """Their licences apply to the mean, too."""
    paths = [tmp_path / f"{name}.ckpt" for name in "pqr"]
    for path, source in zip(paths, ("hf-hub:a/b", "c.safetensors", None), strict=True):
        content = torch.load(three[0][0], weights_only=True)
        content["relvit"]["model"]["pretrained"] = source
        torch.save(content, path)
    average_checkpoints(paths[:2], tmp_path / "mean.ckpt")
    average_checkpoints([tmp_path / "mean.ckpt", paths[2]], tmp_path / "again.ckpt")
    for name, count in (("mean", 2), ("again", 2)):
        found = Checkpoint.read(tmp_path / f"{name}.ckpt")
        assert (found.sources, len(found.average_of)) == (["c.safetensors", "hf-hub:a/b"], count)


def test_the_same_weights_under_two_names_are_said(three, tmp_path):
    """All checkpoints of a run, *.ckpt, have the weights of its last epoch in last.ckpt and in epoch.ckpt."""
    a, b, _ = three[0]
    again = Path(shutil.copy(a, tmp_path / "epoch.ckpt"))
    with pytest.warns(UserWarning, match=r"epoch.ckpt and .*a.ckpt hold the same weights, .* count twice in the mean"):
        average_checkpoints([a, b, again], tmp_path / "mean.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average_checkpoints([a, b], tmp_path / "other.ckpt")


def test_a_temperature_is_left_out_and_said(three, tmp_path):
    paths = [three[0][0], tmp_path / "calibrated.ckpt"]
    content = torch.load(paths[0], weights_only=True)
    content["relvit"]["temperature"] = 2.0
    torch.save(content, paths[1])
    output = tmp_path / "mean.ckpt"
    with pytest.warns(UserWarning, match=r"mean\.ckpt has none; to fit its own: relvit calibrate .*mean\.ckpt"):
        average_checkpoints(paths, output)
    assert "temperature" not in torch.load(output, weights_only=True)["relvit"]


def test_files(three, tmp_path, monkeypatch):
    (a, b, _), output = three[0], tmp_path / "mean.ckpt"
    (tmp_path / "link.ckpt").symlink_to(a)
    (tmp_path / "foreign.ckpt").write_bytes(b"nothing")
    monkeypatch.chdir(a.parent)
    for paths, target, error, message in (
        ([], output, ValueError, "two checkpoints or more"),
        ([a], output, ValueError, "two checkpoints or more"),
        ([a, b, a], output, ValueError, f"{a} is given twice"),
        ([a, b, "a.ckpt"], output, ValueError, f"also as {a}"),
        ([a, tmp_path / "link.ckpt"], output, ValueError, f"also as {a}"),
        ([a, b], a, ValueError, "--output"),
        ([a, b], tmp_path / "mean.pth", ValueError, "allowed are .ckpt"),
        ([a, b], tmp_path / "foreign.ckpt" / "mean.ckpt", NotADirectoryError, "foreign.ckpt, which is not a folder"),
        ([a, "none.ckpt"], output, FileNotFoundError, "none.ckpt"),
        ([a, tmp_path / "foreign.ckpt"], output, ValueError, "foreign.ckpt"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            average_checkpoints(paths, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.ckpt", "link.ckpt"]
    assert sorted(path.name for path in Path(a).parent.iterdir()) == ["a.ckpt", "b.ckpt", "c.ckpt"]


def test_what_differs_is_shown_where_the_rest_is_long():
    names = [f"class {number:03d}" for number in range(40)]
    for ours, theirs, ends in (
        ([*names, "owl"], [*names, "zebra"], ("'class 039', 'owl']", "'class 039', 'zebra']")),
        (f"/{'a' * 90}/x", f"/{'a' * 90}/y", ("aaa/x'", "aaa/y'")),
    ):
        name, *shown = first_difference({"it": ours}, {"it": theirs}, ["it"])
        assert name == "it"
        assert all(text.startswith("...") and len(text) < 50 for text in shown)
        assert all(text.endswith(end) for text, end in zip(shown, ends, strict=True)), shown
    _, *shown = first_difference({"it": names}, {"it": ["owl", *names]}, ["it"])
    assert [text[:7] for text in shown] == ["['class", "['owl',"]
    assert [len(text) for text in shown] == [80, 80]
