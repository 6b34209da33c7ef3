"""timm's models are run to find out which image sizes they take, and only the other sizes are refused."""

import pytest
import timm
import torch

import relvit
from relvit.app.models import build_model, check_image_size, patch_size_of

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
DYNAMIC = VIT | {"dynamic_img_size": True}
FIXED = (
    "vit_tiny_patch16_224 cannot take images of 32 x 40 px (Input width (40) doesn't match model (48)): give "
    "img_size [32,48] or train it with --model.model_kwargs.dynamic_img_size true"
)


@pytest.mark.parametrize(
    ("name", "kwargs", "built", "size", "message"),
    [
        ("vit_tiny_patch16_224", VIT, (32, 48), (32, 40), FIXED),
        ("vit_tiny_patch16_224", DYNAMIC, (32, 48), (32, 44), "divisible by patch size (8)): give img_size [32,48]"),
        ("hiera_tiny_224", {"embed_dim": 8}, 64, (96, 64), "at non-singleton dimension 1): give img_size 64"),
        # timm's model itself would leave out the pixels beyond the last whole patch.
        ("vit_tiny_patch16_224", VIT, (36, 48), (36, 48), "height 36 is not a multiple of the patch size 8: use 32 or"),
        ("vit_tiny_patch16_224", VIT, (32, 44), (32, 44), "width 44 is not a multiple of the patch size 8: use 40 or"),
        (
            "deit_tiny_distilled_patch16_224",
            VIT,
            36,
            (36, 36),
            "36 is not a multiple of the patch size 8",
        ),
        ("swin_tiny_patch4_window7_224", {"depths": (1,)}, 58, (58, 58), "58 is not a multiple of the patch size 4"),
        ("relvit_tiny", {"depth": 1}, 32, (40, 32), "40 is not a multiple of the patch size 16: use 32 or 48 "),
    ],
)
def test_refused(name, kwargs, built, size, message):
    net = build_model(name, 3, 3, built, kwargs)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_image_size(net, size, 3, built)
    text = str(caught.value)
    assert message in text
    assert len(text.splitlines()) == 1


def test_taken():
    for name, kwargs, size in (
        ("vit_tiny_patch16_224", VIT, (32, 48)),
        ("vit_tiny_patch16_224", DYNAMIC | {"dynamic_img_pad": True}, (41, 25)),
        ("test_resnet", {}, (37, 51)),
        ("test_relvit", {}, (80, 48)),
    ):
        check_image_size(build_model(name, 3, 1, (32, 48), kwargs), size, 1, (32, 48))
    net = relvit.retrofit(timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, **VIT))
    check_image_size(net, (48, 24), 3, 32)


def test_trying_changes_nothing():
    net = timm.create_model("test_resnet", num_classes=3).train()
    net.layer1.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    torch.manual_seed(0)
    check_image_size(net, (40, 32), 3)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert [module.training for module in net.modules()] == modes
    assert len(set(modes)) == 2
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_patch_size():
    """timm's XCiT has one number for both sides, and convolutional networks have no patches."""
    assert patch_size_of(timm.create_model("xcit_nano_12_p16_224", depth=1)) == (16, 16)
    naflex = timm.create_model("naflexvit_base_patch16_gap", embed_dim=16, depth=1, num_heads=2)
    assert patch_size_of(naflex) == (16, 16)
    assert patch_size_of(timm.create_model("test_resnet")) == (1, 1)
