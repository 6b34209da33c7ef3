"""A checkpoint has the number of its format: newer formats are refused, older ones are converted by a table."""

import pytest
import torch
from sample_files import write_sample
from small_training import NoiseImages, build, train

import relvit
from relvit.app.training import average_checkpoints, read_checkpoint
from relvit.app.training.checkpoints import upgrades


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("samples") / "last.ckpt")


def of_format(sample, number, path):
    content = torch.load(sample, weights_only=True)
    content["relvit"]["format"] = number
    torch.save(content, path)
    return path


def test_a_checkpoint_of_a_newer_format_is_answered_in_words(sample, tmp_path, fails):
    path = of_format(sample, upgrades.FORMAT + 1, tmp_path / "newer.ckpt")
    begin = f"has format {upgrades.FORMAT + 1} of relvit's checkpoints"
    expected = f"{begin}, and relvit .* reads formats up to {upgrades.FORMAT}: pip install --upgrade relvit"
    with pytest.raises(ValueError, match=f"newer.ckpt {expected}"):
        relvit.load(path)
    assert begin in fails(["validate", path])
    with pytest.raises(ValueError, match=f"the checkpoint {expected}"):
        train(build(), NoiseImages(8), ckpt_path=path, max_epochs=3)


@pytest.mark.parametrize("number", [None, 0, "1", 1.0])
def test_a_checkpoint_without_a_format_is_none_of_relvit(number, sample, tmp_path):
    with pytest.raises(ValueError, match=r"is not a checkpoint of relvit fit: relvit\.format must be 1 or more"):
        read_checkpoint(of_format(sample, number, tmp_path / "none.ckpt"))


def test_a_checkpoint_of_an_earlier_format_passes_each_upgrade(sample, tmp_path, monkeypatch):
    def first(content):
        content["steps"] = ["first"]

    def second(content):
        content["steps"].append("second")

    monkeypatch.setattr(upgrades, "FORMAT", 3)
    monkeypatch.setattr(upgrades, "UPGRADES", {1: first, 2: second})
    content = read_checkpoint(of_format(sample, 1, tmp_path / "first.ckpt"))
    assert (content["steps"], content["relvit"]["format"]) == (["first", "second"], 3)


def test_every_writer_names_the_format(sample, tmp_path):
    twin = tmp_path / "twin.ckpt"
    twin.write_bytes(sample.read_bytes())
    average_checkpoints([sample, twin], tmp_path / "mean.ckpt")
    for path in (sample, tmp_path / "mean.ckpt"):
        assert torch.load(path, weights_only=True)["relvit"]["format"] == upgrades.FORMAT
