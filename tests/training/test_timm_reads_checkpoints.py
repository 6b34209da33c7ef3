"""timm itself loads the checkpoints of a training, with the weights that relvit would use."""

import logging

import pytest
import timm
import torch
from small_training import KWARGS, NoiseImages, train
from timm.models import load_checkpoint, load_state_dict

import relvit
from relvit.models import checkpoint_filter_fn
from relvit.training import ImageClassifier, average_checkpoints, load_classifier
from relvit.training.checkpoints.checkpoint import DescribeCheckpoint
from relvit.training.checkpoints.file import AVERAGE_KEY, TIMM_KEY, read_checkpoint, write_checkpoint

SIZE = {"img_size": (8, 12)}
VIT = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
# name -> arguments of `ImageClassifier`
TRAINED = {
    "relvit": {"model": "test_relvit", "model_kwargs": KWARGS},
    "with an absolute embedding": {"model": "test_relvit", "model_kwargs": {**KWARGS, "pos_embed": "learn"}},
    "without attention": {
        "model": "test_relvit_aft",
        "model_kwargs": {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "kernel_size": 3},
    },
    "plain": {"model": "test_vit", "model_kwargs": VIT},
    "retrofitted": {"model": "test_vit", "model_kwargs": VIT, "retrofit": {"rel_terms": "kv", "init_std": 0.5}},
}


def trained(folder, kind="relvit", ema_decay=0.5, seed=0):
    """The checkpoint of an epoch, the logits that relvit gets from it, and the images."""
    torch.manual_seed(seed)
    own = TRAINED[kind]
    names = [f"class {i}" for i in range(7)]
    module = ImageClassifier(
        num_classes=7, class_names=names, **SIZE, **own, ema_decay=ema_decay, warmup_epochs=0, lr=0.05
    )
    data = NoiseImages(16)
    trainer = train(module, data, max_epochs=1, callbacks=[DescribeCheckpoint()])
    path = folder / f"{kind} {seed}.ckpt"
    trainer.save_checkpoint(path)
    with torch.no_grad():
        return path, load_classifier(path)(data.images), data.images


@pytest.mark.parametrize("ema_decay", [0.5, None])
@pytest.mark.parametrize("kind", TRAINED)
def test_load_checkpoint(kind, ema_decay, tmp_path):
    path, expected, images = trained(tmp_path, kind, ema_decay)
    own = TRAINED[kind]
    model = timm.create_model(own["model"], num_classes=7, **SIZE, **own["model_kwargs"]).eval()
    if "retrofit" in own:
        relvit.retrofit(model, **own["retrofit"])
    assert not torch.allclose(model(images), expected)
    load_checkpoint(model, str(path))
    assert torch.equal(model(images), expected)
    raw = torch.load(path, weights_only=True)["state_dict"]["net.head.weight"]
    assert torch.equal(raw, model.head.weight) == (ema_decay is None)


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind != "retrofitted"])
def test_create_model(kind, tmp_path, caplog):
    path, expected, images = trained(tmp_path, kind)
    own = TRAINED[kind]
    arguments = {"num_classes": 7, **SIZE, **own["model_kwargs"]}
    # timm's own models drop a classifier unless they are told how many classes the file has.
    overlay = {"file": str(path)} | ({"num_classes": 7} if kind == "plain" else {})
    with caplog.at_level(logging.INFO):
        model = timm.create_model(own["model"], pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    assert torch.equal(model.eval()(images), expected)
    assert "issing keys" not in caplog.text
    model = timm.create_model(own["model"], checkpoint_path=str(path), **arguments)
    assert torch.equal(model.eval()(images), expected)


def test_another_number_of_classes_gives_a_new_classifier(tmp_path):
    path, _, images = trained(tmp_path)
    model = timm.create_model(
        "test_relvit", pretrained=True, pretrained_cfg_overlay={"file": str(path)}, num_classes=5, **SIZE, **KWARGS
    )
    assert model.eval()(images).shape == (16, 5)
    relative = "blocks.0.attn.position.key_rows"
    assert torch.equal(model.state_dict()[relative], load_state_dict(str(path))[relative])


def test_the_mean_of_checkpoints(tmp_path):
    paths = [trained(tmp_path, seed=seed)[0] for seed in (0, 1)]
    images = NoiseImages(16).images
    average_checkpoints(paths, tmp_path / "mean.ckpt")
    model = timm.create_model("test_relvit", num_classes=7, **SIZE, **KWARGS).eval()
    load_checkpoint(model, str(tmp_path / "mean.ckpt"))
    weights = [load_state_dict(str(path))["head.weight"] for path in paths]
    torch.testing.assert_close(model.head.weight.detach(), (weights[0] + weights[1]) / 2)
    with torch.no_grad():
        assert torch.equal(model(images), load_classifier(tmp_path / "mean.ckpt")(images))


@pytest.mark.parametrize("ema_decay", [0.5, None])
def test_a_file_grows_by_names_alone(ema_decay, tmp_path):
    path, *_ = trained(tmp_path, ema_decay=ema_decay)
    content = torch.load(path, weights_only=True)
    for key in ("state_dict", AVERAGE_KEY, TIMM_KEY):
        for name in list(content.get(key, ())):
            # Large enough for a copy of the weights to be seen.
            content[key][name] = torch.zeros(50_000)
    held = content.get(AVERAGE_KEY, content["state_dict"])
    content[TIMM_KEY] = {name: held[f"net.{name}"] for name in content[TIMM_KEY]}
    write_checkpoint(content, tmp_path / "with.ckpt")
    del content[TIMM_KEY]
    write_checkpoint(content, tmp_path / "without.ckpt")
    grown = (tmp_path / "with.ckpt").stat().st_size - (tmp_path / "without.ckpt").stat().st_size
    assert 0 < grown < 20_000
    # And so it is in the file that the training wrote.
    content = torch.load(path, weights_only=True)
    held = content.get(AVERAGE_KEY, content["state_dict"])
    for name, tensor in content[TIMM_KEY].items():
        assert tensor.data_ptr() == held[f"net.{name}"].data_ptr()


def test_raw_weights_are_loaded_with_a_warning(tmp_path, caplog):
    """Those of checkpoints from before, and those that somebody asks for."""
    path, *_ = trained(tmp_path)
    old = torch.load(path, weights_only=True)
    raw = old["state_dict"]["net.head.weight"]
    del old[TIMM_KEY]
    torch.save(old, tmp_path / "old.ckpt")
    arguments = {"num_classes": 7, **SIZE, **KWARGS}
    overlay = {"file": str(tmp_path / "old.ckpt")}
    model = timm.create_model("test_relvit", pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    assert torch.equal(model.head.weight, raw)
    assert "raw weights of a checkpoint of relvit fit" in caplog.text
    other = timm.create_model("test_relvit", **arguments)
    load_checkpoint(other, str(path), use_ema=False, filter_fn=checkpoint_filter_fn)
    assert torch.equal(other.head.weight, raw)
    # Without a filter timm refuses the other names.
    with pytest.raises(RuntimeError, match="Missing key"):
        load_checkpoint(other, str(path), use_ema=False)


def test_older_checkpoints_still_load_here(tmp_path):
    path, expected, images = trained(tmp_path)
    old = torch.load(path, weights_only=True)
    del old[TIMM_KEY]
    torch.save(old, tmp_path / "old.ckpt")
    with torch.no_grad():
        assert torch.equal(load_classifier(tmp_path / "old.ckpt")(images), expected)
    module = ImageClassifier("test_relvit", 7, **SIZE, model_kwargs=KWARGS, ema_decay=0.5)
    train(module, NoiseImages(16), ckpt_path=tmp_path / "old.ckpt", max_epochs=2)
    assert module.current_epoch == 2
    assert read_checkpoint(path)["state_dict"].keys() == read_checkpoint(tmp_path / "old.ckpt")["state_dict"].keys()
