"""The position of docs/own_position.md compared with attention under the paper's formula as a mask; graphs."""

import copy
import functools
import re
import sys

import pytest
import timm
import torch
from documents import blocks, text
from timm.models import create_feature_extractor
from timm.models.vision_transformer import VisionTransformer
from vits import DEFAULTS, SMALL, assert_same, images, small

from relvit.app.training import ImageClassifier
from relvit.layers.positions import POSITIONS


def test_the_page_of_positions_has_a_row_for_every_name():
    assert sorted(re.findall(r"^\| `'(.+?)'`", text("docs/positions.md"), re.MULTILINE)) == sorted(POSITIONS)


@pytest.fixture(scope="module")
def quadratic(tmp_path_factory):
    """Import the page's class from a new module, as users would."""
    block, registered = blocks("docs/own_position.md", "python")
    assert len(block.splitlines()) <= 40
    folder = tmp_path_factory.mktemp("docs")
    (folder / "own_position_example.py").write_text(block + registered)
    sys.path.insert(0, str(folder))
    import own_position_example

    yield own_position_example.QuadraticPosition2d
    sys.path.remove(str(folder))
    del sys.modules["own_position_example"]


def formula(position, rows, cols, most, prefix):
    bias = torch.zeros(1, 2, *[prefix + rows * cols] * 2, dtype=torch.float64)
    for head in range(2):
        alpha, (y, x) = position.sharpness[head, 0], position.centre[:, head, 0]
        for i in range(rows * cols):
            for j in range(rows * cols):
                dy = max(-most, min(most, j // cols - i // cols))
                dx = max(-most, min(most, j % cols - i % cols))
                bias[0, head, prefix + i, prefix + j] = -alpha * (dy - y) ** 2 - alpha * (dx - x) ** 2
    return bias


@pytest.mark.parametrize(("most", "extra"), [(14, {}), (1, {"class_token": True, "reg_tokens": 1})])
def test_it_is_its_formula(quadratic, most, extra):
    model = small(position=functools.partial(quadratic, max_distance=most), **extra).double().eval()
    for block in model.blocks[1:]:
        block.attn.position = copy.deepcopy(model.blocks[0].attn.position)
    plain = VisionTransformer(**{**SMALL, **DEFAULTS, "mlp_ratio": 3, **extra}).double().eval()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if ".position." not in name})
    for size in ((24, 16), (16, 40)):
        mask = formula(model.blocks[0].attn.position, size[0] // 8, size[1] // 8, most, model.num_prefix_tokens)
        x = images(*size, dtype=torch.float64)
        assert_same(model(x), plain(x, attn_mask=mask.detach()), atol=1e-10)
        assert (model(x) - plain(x)).abs().max() > 1e-4


def test_it_is_a_position_like_any_other(quadratic):
    model = small(position=quadratic, depth=1).eval()
    assert "blocks.0.attn.position.centre" in model.no_weight_decay()
    assert_same(create_feature_extractor(model, ["head"])(images())["head"], model(images()), atol=0)
    other = small(position=quadratic, depth=1, device="meta").to_empty(device="cpu")
    other.init_weights()
    torch.testing.assert_close(other.blocks[0].attn.position.sharpness, torch.full((2, 1), 0.05))
    other.load_state_dict(model.state_dict())
    assert_same(other.eval()(images(16, 40)), model(images(16, 40)), atol=0)
    exported = torch.export.export(model, (images(16, 40),)).module()
    assert_same(exported(images(16, 40)), model(images(16, 40)), atol=1e-5)


def test_a_model_registered_with_it_is_saved_opened_and_trained(quadratic, tmp_path, caplog):
    small = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("quadratic_vit", num_classes=3, img_size=(24, 16), **small).eval()
    assert isinstance(model.blocks[0].attn.position, quadratic)
    timm.models.save_for_hf(model, tmp_path / "saved", safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert_same(again(images(16, 40)), model(images(16, 40)), atol=0)
    features = timm.create_model("quadratic_vit", features_only=True, out_indices=(0, 1), **small)
    assert [tuple(each.shape[1:]) for each in features(images(16, 40))] == [(16, 2, 5)] * 2
    classifier = ImageClassifier("quadratic_vit", 3, img_size=(24, 16), model_kwargs=small)
    assert classifier.net.patch_embed.grid_size == (3, 2)
    assert not caplog.records
