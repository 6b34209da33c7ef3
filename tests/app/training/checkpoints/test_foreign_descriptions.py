"""A checkpoint, published folder or hub repository of a stranger cannot choose other weights to load."""

import itertools
import json
import shutil
import socket
from pathlib import Path

import pytest
import timm
import torch
from sample_files import publish_sample, write_sample

import relvit
from relvit.app.cli import main
from relvit.app.models.model_factory import BUILDER_ARGUMENTS, build_model
from relvit.app.training.checkpoints.pretrained import Pretrained

# By these arguments of timm's builders a description could choose which weights are loaded.
CHOICES = [
    {"pretrained": True},
    {"checkpoint_path": "secret.pth"},
    {"pretrained_cfg": {"url": "https://example.org/w.pth"}},
    {"pretrained_cfg": {"file": "secret.pth"}},
    {"pretrained_cfg_overlay": {"hf_hub_id": "someone/else"}},
    {"cache_dir": "elsewhere"},
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("samples") / "last.ckpt")


@pytest.fixture(scope="module")
def published(sample):
    return publish_sample(sample, sample.with_name("published"))


@pytest.fixture(autouse=True)
def alone(published, monkeypatch, tmp_path):
    """Any connection, and reading the other file of this machine, fails the test."""
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1)}, "secret.pth")
    load = torch.load

    def connect(*arguments):
        pytest.fail(f"a connection to {arguments[-1]}")

    def read(file, *arguments, **options):
        assert "secret" not in str(file)
        return load(file, *arguments, **options)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(torch, "load", read)


def test_checkpoints_that_choose_weights_are_refused(sample, fails):
    content = torch.load(sample, weights_only=True)
    kwargs = content["relvit"]["model"]["model_kwargs"] or {}
    for model, choice in itertools.product(("test_relvit", "vit_tiny_patch16_224"), CHOICES):
        content["relvit"]["model"] |= {"model": model, "model_kwargs": kwargs | choice}
        torch.save(content, "foreign.ckpt")
        with pytest.raises(ValueError, match=f"must not hold {next(iter(choice))!r}"):
            relvit.load("foreign.ckpt")
    assert "must not hold" in fails(["predict", "foreign.ckpt", "secret.pth"])
    run = ["fit", "--data=DigitsData", "--pretrained", "foreign.ckpt", "--trainer.fast_dev_run=true"]
    assert "must not hold" in fails(run)


def test_folders_that_choose_weights_are_refused(published, fails):
    shutil.copytree(published, "published")
    config = json.loads(Path("published/config.json").read_text())
    changed = [(config | {"model_args": config["model_args"] | choice}, "must not hold") for choice in CHOICES]
    for model in ("hf-hub:someone/else", "local-dir:."):
        changed.append((config | {"architecture": "retrofitted", "model_args": {"model": model}}, "unknown model"))
    for content, message in changed:
        Path("published/config.json").write_text(json.dumps(content))
        for read in (Pretrained("published").architecture, Pretrained("published").weights):
            with pytest.raises(ValueError, match=message):
                read()
    assert message in fails(["probe", "local-dir:published", "--data", "DigitsData"])


def test_the_hub_likewise(monkeypatch):
    """A description stands in for the downloaded config.json."""
    config = {"mean": (0.5,)}, "test_relvit", {"checkpoint_path": "secret.pth"}
    monkeypatch.setattr("relvit.app.training.checkpoints.pretrained.load_model_config_from_hf", lambda name: config)
    with pytest.raises(ValueError, match=r"config.json of hf-hub:someone/else must not hold 'checkpoint_path'"):
        Pretrained("hf-hub:someone/else").weights()


def test_honest_descriptions_load(published):
    state = Pretrained(str(published)).weights().state
    expected = timm.create_model(f"local-dir:{published}", pretrained=True).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, drop_path_rate=0.1, pos_embed="learn")
    relvit.retrofit(vit, rel_terms="k")
    timm.models.save_for_hf(vit, "saved")
    start = Pretrained("saved")
    assert start.architecture().retrofit["rel_terms"] == "k"
    assert torch.equal(start.weights().state["head.weight"], vit.head.weight)
    build_model("vit_tiny_patch16_224", 3, model_kwargs={"depth": 1, "drop_path_rate": 0.1, "pos_embed": "none"})


def test_no_argument_of_a_model_is_one_of_the_builder():
    # There is a small test model of every class of models.
    for name in [*timm.list_models("test_relvit*"), "vit_small_patch16_224", "eva02_tiny_patch14_224", "resnet18"]:
        parameters = timm.create_model(name, num_classes=2).__init__.__code__.co_varnames
        assert not BUILDER_ARGUMENTS & set(parameters)


def test_what_a_user_gives_is_said_to_be_an_option(capsys):
    arguments = ["fit", "--data=DigitsData", "--model.model_kwargs.pretrained", "true", "--trainer.fast_dev_run=true"]
    assert main(arguments) == 2
    assert "--model.pretrained" in capsys.readouterr().err
