"""Pretrained weights: files, folders, addresses and timm's names, and when they are loaded."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import timm
import torch
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants
from lightning import Trainer
from photos import TINY
from safetensors.torch import save_file
from small_training import KWARGS, NAMES, VIT, NoiseImages, assert_close, build, train, train_and_save
from timm.models import save_for_hf
from torch.utils.data import DataLoader

import relvit
from relvit.app.cli import main
from relvit.app.training import ImageClassifier, load_classifier
from relvit.app.training.checkpoints.file import AVERAGE_KEY
from relvit.app.training.checkpoints.pretrained import Architecture, Pretrained, normalisation_note, size_note
from relvit.app.utils.remote import DownloadError
from relvit.models import transfer_weights

DATA = NoiseImages(4, std=(0.25,) * 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint with averaged weights after two steps."""
    module = ImageClassifier("test_relvit", 7, 3, (8, 12), NAMES, KWARGS, ema_decay=0.5, warmup_epochs=0)
    path = tmp_path_factory.mktemp("trained") / "best.ckpt"
    train_and_save(path, module, DATA, max_epochs=2)
    return path


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy of the checkpoint."""
    return Path(shutil.copy(trained, tmp_path))


def test_a_relvit_checkpoint_gives_its_averaged_weights_and_model(checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    weights = Pretrained(str(checkpoint)).weights()
    assert_close(weights.state, {name.removeprefix("net."): value for name, value in content[AVERAGE_KEY].items()})
    assert not torch.equal(weights.state["head.weight"], content["state_dict"]["net.head.weight"])
    assert (weights.class_names, weights.input_size) == (NAMES, (3, 8, 12))
    assert (weights.mean, weights.std) == ((0.5,) * 3, (0.25,) * 3)
    assert Pretrained(str(checkpoint)).architecture() == Architecture("test_relvit", KWARGS, None)


def test_plain_weights_under_the_name_of_a_checkpoint_may_be_renamed(checkpoint):
    torch.save(Pretrained(str(checkpoint)).weights().state, checkpoint)
    with pytest.raises(ValueError, match=r"is not a checkpoint .* in a file whose name ends in \.pth"):
        Pretrained(str(checkpoint)).weights()
    assert "head.weight" in Pretrained(str(checkpoint.rename(checkpoint.with_suffix(".pth")))).weights().state


def test_the_classifier_is_in_the_order_of_the_data_where_the_classifier_has_no_names(checkpoint):
    data = NoiseImages(4, std=(0.25,) * 3)
    data.class_names = NAMES[::-1]
    module = build(pretrained=str(checkpoint), lr=0.0, min_lr=0.0, warmup_epochs=0)
    train(module, data, max_steps=1)
    weight = load_classifier(checkpoint).net.head.weight
    assert torch.equal(module.net.head.weight, weight.flip(0))


def test_files_and_folders_of_weights(tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(8, 12), num_classes=7, **VIT)
    save_file(vit.state_dict(), tmp_path / "a.safetensors")
    torch.save({"model": vit.state_dict()}, tmp_path / "a.pth")
    # timm's training script writes files with averaged weights in this form.
    torch.save({"state_dict": {}, "state_dict_ema": vit.state_dict()}, tmp_path / "a.pth.tar")
    for name in ("a.safetensors", "a.pth", "a.pth.tar"):
        assert_close(Pretrained(str(tmp_path / name)).weights().state, vit.state_dict())
    with pytest.raises(
        ValueError, match=r"a.pth does not say which model it is of: beside --pretrained give --model NAME as well; els"
    ):
        Pretrained(str(tmp_path / "a.pth")).architecture()
    (tmp_path / "a.onnx").write_bytes(b"a graph")
    for name in (str(tmp_path / "a.onnx"), "https://example.com/a.pt2"):
        with pytest.raises(ValueError, match=r"is an exported file, .*: give the checkpoint that was exported"):
            Pretrained(name).weights()

    arguments = VIT | {"img_size": [8, 12]}
    save_for_hf(vit, tmp_path / "folder", model_config={"label_names": NAMES}, model_args=arguments)
    for name in (str(tmp_path / "folder"), f"local-dir:{tmp_path / 'folder'}"):
        weights = Pretrained(name).weights()
        assert_close(weights.state, vit.state_dict())
        assert (weights.class_names, weights.mean) == (NAMES, vit.pretrained_cfg["mean"])
        expected = Architecture("vit_tiny_patch16_224", {**VIT, "global_pool": "token"})
        assert Pretrained(name).architecture() == expected


def test_a_name_of_timm_is_downloaded_by_timm(monkeypatch):
    asked, state = [], timm.create_model("test_vit").state_dict()
    monkeypatch.setattr("relvit.app.models.hub._answers", lambda: True)
    download = "timm.models._builder.load_state_dict_from_hf"
    monkeypatch.setattr(download, lambda *args, **kwargs: asked.append(args) or state)
    weights = Pretrained("test_vit.r160_in1k").weights()
    assert asked == [("timm/test_vit.r160_in1k",)]
    assert_close(weights.state, state)
    assert weights.input_size == (3, 160, 160)
    assert Pretrained("test_vit.r160_in1k").architecture() == Architecture("test_vit.r160_in1k")

    def fail(*args, **kwargs):
        raise OSError("no connection")

    monkeypatch.setattr(download, fail)
    with pytest.raises(ValueError, match="the weights of test_vit could not be loaded: no connection"):
        Pretrained("test_vit").weights()


@pytest.mark.parametrize("name", ["deit3_small_patch16_224.fb_in22k_ft_in1k", "hf-hub:owner/model"])
def test_without_a_network_one_line_says_what_to_do(name, tmp_path, monkeypatch, caplog):
    """The hub's library would retry for minutes, and print a warning for each attempt."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"{seconds} s of waiting for another try"))
    with pytest.raises((ValueError, DownloadError)) as caught:
        Pretrained(name).weights()
    assert str(caught.value).endswith(
        "http://127.0.0.1:9 does not answer, and its cache lacks the file; give weights that you have: a checkpoint, "
        "a folder of weights or, as --pretrained with --model NAME, a file of weights"
    )
    assert not caplog.records
    assert not constants.HF_HUB_OFFLINE


def test_mistakes(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.ckpt").touch()
    for name in ("x.npz", "x.safetensors"):
        (tmp_path / name).write_bytes(b"no weights at all")
    torch.save({"model": re.compile("code")}, tmp_path / "x.pth")
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    for given, message in (
        ("vit_smal_patch16_224", "did you mean 'vit_small_patch16_224'?"),
        ("false", "or null for none"),
        ("test_vit.r160_in2k", "did you mean 'test_vit.r160_in1k'?"),
        ("relvit_small", "timm has no pretrained weights for relvit_small: give a checkpoint"),
        ("true", "'true' names no weights"),
        (f"{tmp_path}", f"give its checkpoint, {tmp_path}/checkpoints/best.ckpt"),
        (f"{tmp_path}/x.npz", "x.npz is a JAX archive: give the name of its model in timm"),
        (f"{tmp_path}/x.pth", "x.pth"),
        (f"{tmp_path}/x.safetensors", "x.safetensors"),
        (f"{tmp_path}/x.ckpt", "x.ckpt"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Pretrained(given).weights()


def test_a_missing_file_is_reported_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/2026-01-02_small/checkpoints/best.ckpt", "weights.pth", "wights.txt", ".wights.pth"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    best = "runs/2026-01-02_small/checkpoints/best.ckpt"
    rest = "; give a checkpoint of relvit fit, a file or folder of weights, the address of a file such as https://"
    for given, hint in (
        ("wights.pth", " (did you mean 'weights.pth'?)"),
        (f"{tmp_path}/weights.pt", f" (did you mean '{tmp_path}/weights.pth'?)"),
        (best.replace("best", "bset"), f" (did you mean '{best}'?)"),
        (best.replace("checkpoints/", ""), f" (did you mean '{best}'?)"),
        (best.replace("01-02", "01-03"), " (did you mean 'runs/2026-01-02_small'?)"),
        ("timm/vit_tiny_patch16_224.augreg_in21k", " (did you mean 'vit_tiny_patch16_224.augreg_in21k'?)"),
        ("timm/vit_tiny_patch16_22", " (did you mean 'vit_tiny_patch16_224'?)"),
        ("deit_small_patch16_224.pth", " (did you mean 'deit_small_patch16_224'?)"),
        ("no/such/folder", ""),
        ("zzz.ckpt", ""),
    ):
        with pytest.raises(FileNotFoundError, match=rf"^{re.escape(f'no weights at {given}{hint}{rest}')}"):
            Pretrained(given).weights()
    for given, there in (("timm/vit_tiny", True), ("timm/vit_tiny.pth", False), ("no/such/folder", False)):
        with pytest.raises(FileNotFoundError) as caught:
            Pretrained(given).weights()
        assert str(caught.value).endswith(f"; if it is on the Hugging Face hub, give hf-hub:{given}") == there


def test_loaded_only_at_the_start_of_a_new_training(checkpoint, tmp_path, capsys):
    module = ImageClassifier(None, 7, 3, (8, 12), NAMES, pretrained=str(checkpoint), lr=0.0, min_lr=0.0)
    assert module.hparams.model == "test_relvit"
    assert module.hparams.model_kwargs == KWARGS
    averaged = torch.load(checkpoint, weights_only=True)[AVERAGE_KEY]
    assert not torch.equal(module.net.head.weight, averaged["net.head.weight"])  # The weights are not loaded yet.
    trainer = train_and_save(tmp_path / "second.ckpt", module, DATA, max_epochs=1)
    assert_close(module.state_dict(), averaged)
    count = len(averaged)
    assert f"pretrained: {count} of {count} tensors from {checkpoint}\n" in capsys.readouterr().out
    checkpoint.unlink()

    # Later the file is not needed: a second training, a validation, and a resume from the module's checkpoint work
    # without it.
    train(module, DATA, max_epochs=1)
    trainer.validate(module, DATA, verbose=False)
    loaded = load_classifier(tmp_path / "second.ckpt")
    assert_close(loaded.state_dict(), averaged)
    train(loaded, DATA, max_epochs=1)
    again = ImageClassifier(**torch.load(tmp_path / "second.ckpt", weights_only=True)["relvit"]["model"])
    train(again, DATA, max_epochs=2, ckpt_path=tmp_path / "second.ckpt")
    assert_close(again.state_dict(), averaged)
    assert "pretrained:" not in capsys.readouterr().out
    restored = ImageClassifier.load_from_checkpoint(tmp_path / "second.ckpt")
    assert_close(restored.state_dict(), averaged)
    train(restored, DATA, max_epochs=1)


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_an_evaluation_without_a_training_has_the_pretrained_weights(name, checkpoint):
    """The weights would be random, and the results without a meaning; a later training starts from the same weights."""
    module = ImageClassifier(None, 7, 3, (8, 12), NAMES, pretrained=str(checkpoint), lr=0.0, min_lr=0.0)
    averaged = torch.load(checkpoint, weights_only=True)[AVERAGE_KEY]
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    named = DataLoader([(image, "name") for image in DATA.images], 4)
    getattr(trainer, name)(module, named if name == "predict" else DATA)
    assert_close(module.state_dict(), averaged)
    train(module, DATA, max_epochs=1)
    assert_close(module.state_dict(), averaged)


class Still(ImageClassifier):
    """A subclass with its own optimiser, which does not load the weights."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_start(self, batch, batch_idx):
        self.first = {name: value.clone() for name, value in self.state_dict().items()}


def test_a_subclass_with_its_own_optimiser_starts_from_the_weights(checkpoint):
    """The first validation must not load the weights: that would undo the training of the first epoch."""
    module = Still(None, 7, 3, (8, 12), NAMES, pretrained=str(checkpoint))
    train(module, DATA, max_epochs=1)
    assert_close(module.first, torch.load(checkpoint, weights_only=True)[AVERAGE_KEY])


def test_arguments_change_the_model_that_the_weights_are_of(checkpoint):
    module = ImageClassifier(
        None, 5, pretrained=str(checkpoint), model_kwargs={"max_distance": 3, "pos_drop_rate": 0.1}
    )
    assert module.hparams.model_kwargs == {**KWARGS, "max_distance": 3, "pos_drop_rate": 0.1}
    assert module.net.blocks[0].attn.position.max_distance == (3, 3)
    assert build().hparams.pretrained is None
    with pytest.raises(ValueError, match=r"model_kwargs must not hold 'pretrained'.* --model.pretrained"):
        ImageClassifier("test_vit", 7, model_kwargs={"pretrained": True})


def test_the_grid_of_a_retrofitted_folder_is_that_of_its_images(tmp_path):
    """timm writes the size of the images to `input_size` for models of one size alone."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(8, 12), num_classes=7, **VIT)
    save_for_hf(vit, tmp_path / "plain", model_args=VIT | {"img_size": [8, 12]})
    arguments = VIT | {"img_size": [8, 12], "model": "vit_tiny_patch16_224", "retrofit": {}}
    save_for_hf(relvit.retrofit(vit), tmp_path / "retrofitted", model_args=arguments)
    resized = []
    for name in ("plain", "retrofitted"):
        weights = Pretrained(str(tmp_path / name)).weights()
        assert weights.input_size == (3, 8, 12)
        assert size_note(weights, SimpleNamespace(img_size=(8, 12))) is None
        net = ImageClassifier(None, 7, img_size=(12, 8), pretrained=str(tmp_path / name)).net
        transfer_weights(net, weights)
        resized.append(net.pos_embed)
    # Both grids have six patches, so the embedding changes without another shape.
    assert not torch.equal(resized[0], vit.pos_embed)
    torch.testing.assert_close(resized[1], resized[0])


def test_a_note_about_another_size(checkpoint):
    weights = Pretrained(str(checkpoint)).weights()
    expected = "Note: the images have 16 x 8 px, those of the pretrained weights had --img_size '[8,12]'"
    assert size_note(weights, SimpleNamespace(img_size=(16, 8))) == expected
    assert size_note(weights, SimpleNamespace(img_size=(8, 12))) is None
    assert size_note(weights, SimpleNamespace(img_size=8)).startswith("Note: the images have 8 x 8 px")
    assert size_note(weights, None) is None


def test_a_note_about_another_normalisation(checkpoint):
    weights, data = Pretrained(str(checkpoint)).weights(), SimpleNamespace(mean=DATA.mean, std=DATA.std)
    assert normalisation_note(weights, data, 3) is None
    data.std = (0.25, 0.25, 0.28)
    assert normalisation_note(weights, data, 3) is None
    data.mean = (0.5, 0.4, 0.5)
    expected = (
        "Note: the images are normalised by mean [0.5,0.4,0.5], those of the pretrained weights were by "
        "--data.mean '[0.5,0.5,0.5]'"
    )
    assert normalisation_note(weights, data, 3) == expected
    # Data modules of a user may have arrays, or one number for all channels.
    data.mean, data.std = torch.tensor(data.mean), 0.25
    assert normalisation_note(weights, data, 3) == expected
    data.std = (1.0, 1.0, 1.0)
    assert normalisation_note(weights, data, 3).endswith("--data.mean '[0.5,0.5,0.5]' --data.std '[0.25,0.25,0.25]'")
    assert normalisation_note(weights, None, 3) is None


def test_normalisation_of_weights(checkpoint, tmp_path):
    assert Pretrained(str(checkpoint)).normalisation() == ((0.5,) * 3, (0.25,) * 3)
    # timm's table has the mean and the standard deviation of these weights, so nothing is downloaded.
    assert Pretrained("vit_small_patch16_224.augreg_in21k").normalisation() == ((0.5,) * 3, (0.5,) * 3)
    assert Pretrained("deit_small_patch16_224").normalisation() == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.save({}, tmp_path / "plain.pth")
    assert Pretrained(str(tmp_path / "plain.pth")).normalisation() == (None, None)
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "pretrained_cfg": {"mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Pretrained(str(tmp_path)).normalisation() == ((0.1, 0.2, 0.3), None)
    config["pretrained_cfg"]["mean"] = ["red"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"finite numbers, got mean \['red'\] and std None; correct them in its config"
    ):
        Pretrained(str(tmp_path)).normalisation()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"does not say which model it is of \(.*\): add 'architecture', the name of"):
        Pretrained(str(tmp_path)).normalisation()


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (("--model.pretrained", "--model.teacher"), "--trainer.fast_dev_run=true"),
        (("--ckpt_path",), "--trainer.max_epochs=5"),
    ],
)
def test_a_training_fetches_each_address_once(options, length, run, photos, tmp_path, monkeypatch):
    fetched, get_file = [], MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda self, path, *args: fetched.append(path) or get_file(self, path, *args)
    )
    # Without --model.model the pretrained weights determine the model.
    tiny = TINY if "--ckpt_path" in options else [option for option in TINY if not option.startswith("--model.model")]
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *tiny]
    for option in options:
        fsspec.filesystem("memory").pipe(f"/source/{option}.ckpt", (run / "checkpoints" / "best.ckpt").read_bytes())
        arguments.append(f"{option}=memory://source/{option}.ckpt")
    assert main([*arguments, length]) == 0
    assert sorted(fetched) == sorted(f"/source/{option}.ckpt" for option in options)
