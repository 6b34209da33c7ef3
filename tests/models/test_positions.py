"""The positions that a model can be built with."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import relvit  # noqa: F401 (registers the models)
from relvit.layers import RelativePosition2d, SlopePosition2d

SMALL = {"img_size": (24, 16), "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 5}
SLOPES = [1 / 16, 1 / 256]  # of two heads


def build(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model("test_relvit", **{**SMALL, **kwargs})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images(height, width, dtype=torch.float32):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


def bias_of(height, width, prefix, most):
    """-m (|dy| + |dx|), pair by pair: (1, heads, N, N)."""
    bias = torch.zeros(1, 2, *[prefix + height * width] * 2, dtype=torch.float64)
    for head, slope in enumerate(SLOPES):
        for i in range(height * width):
            for j in range(height * width):
                dy, dx = abs(i // width - j // width), abs(i % width - j % width)
                bias[0, head, prefix + i, prefix + j] = -slope * (min(dy, most) + min(dx, most))
    return bias


@pytest.mark.parametrize("extra", [{}, {"class_token": True, "reg_tokens": 2}])
@pytest.mark.parametrize("size", [(24, 16), (8, 40), (72, 16)])
@pytest.mark.parametrize("max_distance", [None, 1])
def test_slopes_are_a_bias_in_timms_vision_transformer(extra, size, max_distance):
    model = build(position="slopes", max_distance=max_distance, **extra).double()
    options = {"class_token": False, "global_pool": "avg", "pos_embed": "", "mlp_ratio": 3, **SMALL, **extra}
    plain = VisionTransformer(**options, dynamic_img_size=True).double().eval()
    plain.load_state_dict(model.state_dict())  # the same parameters: slopes have none
    x = images(*size, dtype=torch.float64)
    bias = bias_of(size[0] // 8, size[1] // 8, model.num_prefix_tokens, 100 if max_distance is None else max_distance)
    expected = plain.forward_features(x, attn_mask=bias)
    torch.testing.assert_close(model.forward_features(x), expected, rtol=0, atol=1e-12)
    assert (expected - plain.forward_features(x)).abs().max() > 1e-3
    assert model.no_weight_decay() == plain.no_weight_decay()


def test_slopes_exported_once_for_all_sizes():
    model = build(position="slopes", class_token=True)
    height, width = (8 * torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    exported = torch.export.export(model, (images(24, 16),), dynamic_shapes=({2: height, 3: width},)).module()
    for size in [(24, 16), (16, 80), (136, 32)]:
        torch.testing.assert_close(exported(images(*size)), model(images(*size)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "kind", "distance"),
    [
        ({}, RelativePosition2d, (7, 7)),
        ({"max_distance": [2, 3]}, RelativePosition2d, (2, 3)),
        ({"position": "slopes"}, SlopePosition2d, None),
        ({"position": "slopes", "max_distance": (2, 3)}, SlopePosition2d, (2, 3)),
    ],
)
def test_each_position_has_its_own_default_distance(kwargs, kind, distance):
    for block in build(**kwargs).blocks:
        assert type(block.attn.position) is kind
        assert block.attn.position.max_distance == distance


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position": "slope"}, r"position must be one of 'tables', 'slopes', got 'slope' \(did you mean 'slopes'\?\)"),
        (
            {"position": "slopes", "rel_terms": "k"},
            "rel_terms is for position 'tables', got rel_terms='k' with .*slopes",
        ),
        ({"position": "slopes", "shared_heads": False}, "shared_heads is for position 'tables'"),
        ({"position": "slopes", "layout": "joint"}, "layout is for position 'tables'"),
        ({"position": "slopes", "bucketing": "piecewise"}, "bucketing is for position 'tables'"),
        ({"position": "slopes", "rel_init_std": 0.5}, "rel_init_std is for position 'tables', got rel_init_std=0.5"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)
