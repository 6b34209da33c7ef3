"""Odd checkpoints, folders of weights and lists are refused in relvit's own words, with exit status 2."""

import json
import os
import shutil

import pytest
import torch
from photos import TINY

from relvit.app.cli import main
from relvit.app.cli.errors import describe, is_self_explanatory
from relvit.app.data.archives.webdataset import expand_braces

pytestmark = pytest.mark.slow

QUIET = ["--num_workers=0"]


@pytest.fixture
def spoilt(best, tmp_path):
    """Return a function that changes the description in a checkpoint, and returns the new file."""

    def change(edit):
        content = torch.load(best, weights_only=True)
        edit(content["relvit"])
        torch.save(content, tmp_path / "bad.ckpt")
        return tmp_path / "bad.ckpt"

    return change


@pytest.mark.parametrize(("name", "value"), [("norm_layer", "os.system"), ("act_layer", 5)])
def test_arguments_of_a_model(name, value, spoilt, photos, fails):
    file = spoilt(lambda d: d["model"].update(model_kwargs=(d["model"]["model_kwargs"] or {}) | {name: value}))
    assert "cannot be built with model_kwargs" in fails(["predict", file, photos / "test", *QUIET])


@pytest.mark.parametrize(("name", "value"), [("crop_pct", 1e-9), ("crop_pct", torch.nan), ("mean", (torch.nan,) * 3)])
def test_transforms(name, value, spoilt, photos, fails):
    file = spoilt(lambda d: d["data"]["init_args"].update({name: value}))
    assert name in fails(["predict", file, photos / "test", *QUIET])


def test_a_class_name_of_megabytes(spoilt, photos, fails):
    def edit(description):
        for arguments in (description["model"], description["data"]["init_args"]):
            if arguments.get("class_names"):
                arguments["class_names"] = ["x" * 10_001, "dog", "owl"]

    assert "class_names is missing or has a wrong value" in fails(["predict", spoilt(edit), photos / "test", *QUIET])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"architecture": ' * 50_000])
def test_a_description_of_weights(text, photos, tmp_path, fails):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "config.json").write_text(text)
    message = fails(
        ["fit", "--data=ImageFolderData", f"--data.root={photos}", *TINY, f"--model.pretrained={tmp_path / 'w'}"]
    )
    assert "config.json" in message


@pytest.mark.parametrize("text", ["[" * 100_000, "5"])
@pytest.mark.parametrize("command", ["predict", "explain"])
def test_a_folder_with_such_a_description_in_the_place_of_a_checkpoint(command, text, tmp_path, fails):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "config.json").write_text(text)
    assert str(tmp_path / "w") in fails([command, tmp_path / "w"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        *((text, "it is not a list of rows with a checkpoint and size") for text in ('{"a": 1}', "[1]", "[{}]")),
    ],
)
def test_a_list_of_accuracies_of_another_form(text, reason, best, tmp_path, fails):
    curve = tmp_path / "curve.json"
    curve.write_text(text)
    publish = ["publish", str(best), f"--to={tmp_path / 'w'}"]
    message = fails([*publish, f"--curve={curve}"])
    again = f"relvit resolutions {best} --sizes SIZE ... --output {curve}"
    assert f"curve.json is not a JSON file of relvit resolutions ({reason}): write it again by {again}" in message
    if text == "[1]":
        run = shutil.copytree(best.parent.parent, tmp_path / "run")
        curve.rename(run / "resolutions.json")
        moved = str(run / "checkpoints" / "best.ckpt")
        assert fails(["publish", moved, *publish[2:]]).rstrip().endswith("resolutions.json, or remove it")
        (run / "resolutions.json").unlink()
        assert main(["publish", moved, *publish[2:]]) == 0


@pytest.mark.parametrize("mean", ["NaN", "1e999"])
def test_mean_of_a_description_of_weights(mean, best, photos, tmp_path, fails):
    (tmp_path / "w").mkdir()
    config = {"architecture": "test_relvit", "pretrained_cfg": {"mean": ["MEAN"] * 3, "std": [0.5] * 3}}
    (tmp_path / "w" / "config.json").write_text(json.dumps(config).replace('"MEAN"', mean))
    message = fails(
        ["fit", "--data=ImageFolderData", f"--data.root={photos}", *TINY, f"--model.pretrained={tmp_path / 'w'}"]
    )
    assert "mean" in message


def test_a_pipe_or_device_as_checkpoint(photos, tmp_path, fails):
    os.mkfifo(tmp_path / "pipe.ckpt")
    for file in (tmp_path / "pipe.ckpt", "/dev/null", "/dev/zero"):
        for command in (["predict", file, photos], ["validate", file]):
            message = fails(command)
            assert "it is not a file but a pipe, a socket or a device" in message
            assert "did you mean" not in message
        fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", *TINY, f"--model.pretrained={file}"]
        assert "it is not a file but a pipe, a socket or a device" in fails(fit)


def test_a_missing_image_with_mirror(best, tmp_path, fails):
    assert "MISSING" in fails(["predict", best, tmp_path / "MISSING", "--mirror"])


@pytest.mark.parametrize("split", ["{0..999999999}.tar", "{0..999}/{0..999}.tar", "a{000000..100000}.tar"])
def test_a_range_of_archives(split):
    with pytest.raises(ValueError, match="the most are 100,000"):
        expand_braces(split)


def test_a_process_that_loads_images_and_is_killed():
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert describe(error).startswith("a process that loads images has ended, perhaps because memory ran out")
    assert "--data.num_workers" in describe(error)
    assert "--num_workers" in describe(RuntimeError("DataLoader worker (pid(s) 3, 4) exited unexpectedly"), "predict")
    assert is_self_explanatory(error)


# The first is PyTorch's own message, which a container with Docker's default of 64 MB reaches soon.
@pytest.mark.parametrize(
    "text",
    [
        "unable to allocate shared memory(shm) for file </torch_17_2671332269_0>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that workers are out of memory",
    ],
)
def test_a_full_shared_memory(text):
    assert "/dev/shm" in describe(RuntimeError(text))
    assert "(--data.num_workers=0)" in describe(RuntimeError(text))
    assert is_self_explanatory(RuntimeError(text))
