"""timm itself loads the checkpoints of a training, with the weights that relvit evaluates."""

import functools
import logging

import pytest
import timm
import torch
from small_training import KWARGS, NAMES, VIT, NoiseImages, train_and_save
from timm.models import load_checkpoint, load_state_dict

import relvit
from relvit.app.training import ImageClassifier, average_checkpoints, load_classifier
from relvit.app.training.checkpoints.file import AVERAGE_KEY, TIMM_KEY
from relvit.models import checkpoint_filter_fn

SIZE = {"img_size": (8, 12)}
# Each name has arguments of `ImageClassifier`.
TRAINED = {
    "relvit": {"model": "test_relvit", "model_kwargs": KWARGS},
    "with an absolute embedding": {"model": "test_relvit", "model_kwargs": {**KWARGS, "pos_embed": "learn"}},
    "without attention": {"model": "test_relvit_aft", "model_kwargs": {**VIT, "kernel_size": 3}},
    "plain": {"model": "test_vit", "model_kwargs": VIT},
    "retrofitted": {"model": "test_vit", "model_kwargs": VIT, "retrofit": {"rel_terms": "kv", "init_std": 0.5}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that gives the checkpoint after two steps, relvit's logits, and the images."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train_once(kind="relvit", ema_decay=0.5):
        torch.manual_seed(0)
        options = {"ema_decay": ema_decay, "warmup_epochs": 0, "lr": 0.05, "class_names": NAMES}
        module = ImageClassifier(num_classes=7, **SIZE, **TRAINED[kind], **options)
        path, data = folder / f"{kind} {ema_decay}.ckpt", NoiseImages(8)
        train_and_save(path, module, data, max_epochs=1)
        with torch.no_grad():
            return path, load_classifier(path)(data.images), data.images

    return train_once


@pytest.mark.parametrize(("kind", "ema_decay"), [*((kind, 0.5) for kind in TRAINED), ("relvit", None)])
def test_each_function_of_timm_loads_the_weights_for_evaluation(kind, ema_decay, trained, caplog):
    path, expected, images = trained(kind, ema_decay)
    own = TRAINED[kind]
    arguments = {"num_classes": 7, **SIZE, **own["model_kwargs"]}
    model = timm.create_model(own["model"], **arguments).eval()
    if "retrofit" in own:
        relvit.retrofit(model, **own["retrofit"])
    assert not torch.allclose(model(images), expected)
    load_checkpoint(model, str(path))
    assert torch.equal(model(images), expected)
    content = torch.load(path, weights_only=True)
    assert torch.equal(content["state_dict"]["net.head.weight"], model.head.weight) == (ema_decay is None)
    # PyTorch writes a tensor with two names once, so only the additional names make the file larger.
    held = content.get(AVERAGE_KEY, content["state_dict"])
    for name, tensor in content[TIMM_KEY].items():
        assert tensor.data_ptr() == held[f"net.{name}"].data_ptr()
    if "retrofit" in own:
        return
    # timm's own models drop the classifier of a file, unless the configuration has the file's number of classes.
    overlay = {"file": str(path)} | ({"num_classes": 7} if kind == "plain" else {})
    with caplog.at_level(logging.INFO):
        model = timm.create_model(own["model"], pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    assert torch.equal(model.eval()(images), expected)
    assert "issing keys" not in caplog.text
    model = timm.create_model(own["model"], checkpoint_path=str(path), **arguments)
    assert torch.equal(model.eval()(images), expected)


def test_another_number_of_classes_gives_a_new_classifier(trained):
    path, _, images = trained()
    overlay = {"file": str(path)}
    model = timm.create_model(
        "test_relvit", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5, **SIZE, **KWARGS
    )
    assert model.eval()(images).shape == (8, 5)
    relative = "blocks.0.attn.position.key_rows"
    assert torch.equal(model.state_dict()[relative], load_state_dict(str(path))[relative])


def test_the_mean_of_checkpoints(trained, tmp_path):
    paths = [trained(ema_decay=decay)[0] for decay in (0.5, None)]
    average_checkpoints(paths, tmp_path / "mean.ckpt")
    model = timm.create_model("test_relvit", num_classes=7, **SIZE, **KWARGS).eval()
    load_checkpoint(model, str(tmp_path / "mean.ckpt"))
    weights = [load_state_dict(str(path))["head.weight"] for path in paths]
    torch.testing.assert_close(model.head.weight.detach(), (weights[0] + weights[1]) / 2)


def test_timm_reads_the_raw_weights_where_it_is_asked_for_them(trained, caplog):
    path, _, _ = trained()
    raw = torch.load(path, weights_only=True)["state_dict"]["net.head.weight"]
    other = timm.create_model("test_relvit", num_classes=7, **SIZE, **KWARGS)
    load_checkpoint(other, str(path), use_ema=False, filter_fn=checkpoint_filter_fn)
    assert torch.equal(other.head.weight, raw)
    assert "raw weights of a checkpoint of relvit fit" in caplog.text
    # Without a filter function timm refuses names that the model does not have.
    with pytest.raises(RuntimeError, match="Missing key"):
        load_checkpoint(other, str(path), use_ema=False)
