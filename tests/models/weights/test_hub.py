"""Models saved for the Hugging Face hub, loaded from folders, and by name with a replaced download."""

import functools
import json

import numpy as np
import pytest
import timm
import torch
from huggingface_hub.utils import EntryNotFoundError
from timm.models import _hub
from timm_versions import needs_timm
from vits import SMALL, assert_same, images, small

from relvit.families.transformer_xl import set_bands
from relvit.layers import RelativePosition2d

# timm records the arguments of models since version 1.0.31.
pytestmark = needs_timm("1.0.31")

KINDS = [
    {"rel_terms": "qkvb", "max_distance": (1, 2), "class_token": True, "global_pool": "token"},
    {"position": "slopes", "max_distance": 2, "reg_tokens": 2, "pos_embed": "learn"},
    {"layout": "joint", "shared_heads": False, "bucketing": "piecewise", "max_distance": 2, "in_chans": 1},
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


@pytest.mark.parametrize(("kind", "safe"), zip(KINDS, (True, False, "both"), strict=True), ids=str)
def test_saved_and_loaded_as_it_was(kind, safe, folder):
    model = small(**kind).eval()
    timm.models.save_for_hf(model, folder, safe_serialization=safe)
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "test_relvit"
    saved = {name: tuple(value) if isinstance(value, list) else value for name, value in config["model_args"].items()}
    assert {**SMALL, **kind}.items() <= saved.items()
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        *(["model.safetensors"] if safe else []),
        *(["pytorch_model.bin"] if safe is not True else []),
    }
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = images(16, 40, channels=kind.get("in_chans", 3))
    assert_same(again(x), model(x), atol=0)
    assert again.pretrained_model_args == config["model_args"]
    assert again.pretrained_cfg["license"] == "apache-2.0"


def test_what_changed_after_construction_is_saved_too(folder):
    model = small(pos_embed="learn", class_token=True).eval()
    model.set_input_size((40, 16), patch_size=4)
    model.reset_classifier(7, "max")
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    for size in ((40, 16), (16, 24)):
        assert_same(again(images(*size)), model(images(*size)), atol=0)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: small("test_relvit_universal", depth=4), lambda model: model.set_steps(2)),
        (
            lambda: small("test_relvit_universal", depth=4),
            lambda model: model.prune_intermediate_layers([1], False, False),
        ),
        (lambda: small(position="xl"), lambda model: set_bands(model, 1, 0)),
        (lambda: small(position="xl", band_rows=1, memory_rows=0), lambda model: set_bands(model, None)),
        (lambda: small("test_relvit_lsh"), lambda model: model.set_hashing(1, np.int64(2))),
    ],
    ids=["steps", "pruned", "bands", "no bands", "hashing"],
)
def test_changes_without_weights_are_saved_too(make, change, folder):
    model, x = make().eval(), images(24, 16)
    before = model(x)
    change(model)
    assert (model(x) - before).abs().max() > 1e-4
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    assert_same(timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(x), model(x), atol=0)


def test_other_arguments_than_the_saved_ones_convert_the_weights(folder):
    model = small(max_distance=1, pos_embed="learn").double().eval()
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    x = images(24, 16, dtype=torch.float64)
    changed = {"max_distance": 4, "shared_heads": False, "rel_terms": "qkvb"}
    again = timm.create_model(f"local-dir:{folder}", pretrained=True, dtype=torch.float64, **changed).eval()
    assert again.blocks[0].attn.position.key_rows.shape == (2, 9, 6)
    assert_same(again(x), model(x))
    finer = timm.create_model(f"local-dir:{folder}", pretrained=True, dtype=torch.float64, num_classes=3).eval()
    assert finer(x).shape == (2, 3)
    assert_same(finer.forward_features(x), model.forward_features(x))


def test_from_a_hub_by_name(folder, monkeypatch):
    model = small(rel_terms="k", max_distance=3).eval()
    timm.models.save_for_hf(model, folder, safe_serialization=True)

    def download(repo_id, filename, revision=None, cache_dir=None):
        assert (repo_id, revision) == ("someone/relvit", "v2")
        if not (folder / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", download)
    again = timm.create_model("hf-hub:someone/relvit@v2", pretrained=True).eval()
    assert again.blocks[0].attn.position.max_distance == (3, 3)
    assert_same(again(images(16, 40)), model(images(16, 40)), atol=0)


def test_a_position_of_ones_own_has_no_name_to_save(folder):
    model = small(position=functools.partial(RelativePosition2d, max_distance=1))
    with pytest.raises(
        ValueError, match="Model argument 'position' is not serializable; provide a model_args replacement"
    ):
        timm.models.save_for_hf(model, folder)
    timm.models.save_for_hf(model, folder, model_args={"position": "tables", "max_distance": 1})
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert_same(again(images()), model.eval()(images()), atol=0)
