"""The description of a trained model for timm, whose transform is relvit's; `test_publish.py` has saved folders."""

import pytest
import torch
from command_line import write_checkpoint_like
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import relvit
from relvit.data.modules.paths import ImagePathsData
from relvit.training import ImageClassifier

DATA = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25), "crop_pct": 0.8}
CONFIG = {"input_size": (3, 16, 24), **DATA, "crop_mode": "center", "interpolation": "bicubic"}
OPTIONS = {"patch_size": 8, "embed_dim": 16, "depth": 2}


@pytest.fixture(scope="module")
def path(best, tmp_path_factory):
    """A checkpoint with its own preprocessing."""
    target = tmp_path_factory.mktemp("timm") / "best.ckpt"
    return write_checkpoint_like(best, target, "test_relvit", OPTIONS, img_size=[16, 24], **DATA)


@pytest.mark.parametrize(("size", "channels"), [([16, 24], 3), ([16, 16], 1)], ids=str)
def test_timms_transform_of_the_model_is_relvits(path, tmp_path, size, channels):
    """Also that of files, which `relvit predict` uses with a checkpoint and with an exported file."""
    content = torch.load(path, weights_only=True)
    content["relvit"]["model"] |= {"in_chans": channels, "img_size": size}
    data = content["relvit"]["data"]["init_args"] | {"img_size": size}
    data |= {name: data[name][:channels] for name in ("mean", "std")}
    content["relvit"]["data"]["init_args"] = data
    content["state_dict"] = ImageClassifier(**content["relvit"]["model"]).state_dict()
    torch.save(content, tmp_path / "best.ckpt")
    clf = relvit.load(tmp_path / "best.ckpt")
    timms = create_transform(**resolve_model_data_config(clf.model))
    files = ImagePathsData([], clf.class_names, clf.img_size, clf.mean, clf.std, clf.crop_pct)
    for shape in ((30, 43), (48, 31), (21, 20), (9, 35)):
        image = Image.effect_noise(shape, 80).convert("RGB")
        expected = timms(image if channels == 3 else image.convert("L"))
        torch.testing.assert_close(files.file_transform(image), expected)
        (pixels, _) = next(clf.batches([image]))
        torch.testing.assert_close(pixels[0], expected)


def test_the_description_is_of_the_training(path):
    clf = relvit.load(path, img_size=(24, 32))
    assert clf.img_size == (24, 32)
    cfg = clf.model.pretrained_cfg
    assert resolve_model_data_config(clf.model) == CONFIG
    assert clf.model.default_cfg is cfg
    assert not cfg.keys() & {"url", "hf_hub_id", "file", "tag", "test_input_size", "label_offset"}
