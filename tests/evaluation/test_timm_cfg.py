"""The description of a trained model for timm, and what timm computes with it."""

import json

import pytest
import timm
import torch
from photos import TINY
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import save_for_hf

import relvit
from relvit.cli import main

TRAINED = ["--data.img_size=[16,24]", "--data.mean=[0.4,0.5,0.6]", "--data.std=[0.2,0.3,0.25]", "--data.crop_pct=0.8"]
CONFIG = {
    "input_size": (3, 16, 24),
    "mean": (0.4, 0.5, 0.6),
    "std": (0.2, 0.3, 0.25),
    "crop_pct": 0.8,
    "crop_mode": "center",
    "interpolation": "bicubic",
}
# name -> options of `relvit fit`
MODELS = {
    "relvit": ["--model.model_kwargs.pos_embed=learn"],
    "retrofitted": ["--model.model=test_vit", "--model.retrofit.rel_terms=kvb"],
}


@pytest.fixture(scope="module", params=MODELS)
def trained(request, photos, tmp_path_factory):
    """The checkpoint of a training with its own preprocessing."""
    runs = tmp_path_factory.mktemp("runs")
    tiny = [option for option in TINY if "max_distance" not in option and "img_size" not in option]
    if request.param != "relvit":
        tiny = [option for option in tiny if "model.model=" not in option]
    fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", "--trainer.max_epochs=1"]
    assert main([*fit, *tiny, *MODELS[request.param], *TRAINED, "--model.ema_decay=0.9"]) == 0
    return next(runs.glob("*/checkpoints/best.ckpt"))


def data_config(model):
    """JSON knows no tuples."""
    resolved = resolve_model_data_config(model)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in resolved.items()}


def pixels():
    return torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def test_a_saved_folder_has_weights_classes_and_preprocessing(trained, tmp_path):
    clf = relvit.load(trained)
    assert not clf.model.training
    assert resolve_model_data_config(clf.model) == CONFIG
    save_for_hf(clf.model, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_classes"] == config["pretrained_cfg"]["num_classes"] == 3
    assert config["pretrained_cfg"]["label_names"] == ["cat", "dog", "owl"]
    with torch.no_grad():
        expected = clf.model(pixels())
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert data_config(again) == CONFIG
    assert again.pretrained_cfg["label_names"] == ["cat", "dog", "owl"]
    with torch.no_grad():
        assert torch.equal(again.eval()(pixels()), expected)


def test_the_description_is_of_the_training(trained, run):
    clf = relvit.load(trained)
    transform = create_transform(**resolve_model_data_config(clf.model))
    noise = torch.randint(0, 256, (40, 60, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.numpy())
    torch.testing.assert_close(transform(image), clf.transform(image))
    cfg = clf.model.pretrained_cfg
    assert not cfg.keys() & {"url", "hf_hub_id", "file", "tag", "test_input_size", "label_offset"}
    # The size of the training stays.
    clf = relvit.load(run / "checkpoints" / "best.ckpt", img_size=(24, 32))
    assert clf.img_size == (24, 32)
    assert clf.model.pretrained_cfg["input_size"] == (3, 16, 16)
    assert clf.model.default_cfg is clf.model.pretrained_cfg


def test_grey_images(digits_run, tmp_path):
    clf = relvit.load(digits_run / "checkpoints" / "best.ckpt")
    save_for_hf(clf.model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    config = data_config(again)
    assert config["input_size"] == (1, *clf.img_size)
    assert (config["mean"], config["std"]) == (clf.mean, clf.std)
    images = torch.randn(2, *config["input_size"])
    with torch.no_grad():
        assert torch.equal(again(images), clf.model(images))
