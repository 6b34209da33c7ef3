"""Before a run the model computes images of the data's shape, and a model that does not accept them is refused."""

import pytest
import timm
import torch
from vits import native_batch, small

import relvit
from relvit.app.data.shape import image_shape, shape_of
from relvit.app.training.base_classifier import pooled_features


@pytest.mark.parametrize(
    "given",
    [
        {"img_size": (24, 40)},
        {"img_size": (24, 40), "native": True, "patch_size": 8},
        {"img_size": (30, 40), "native": True, "patch_size": (8, 16)},
        {"img_size": (24, 40), "native": True, "patch_size": 8, "max_tokens": 11},
    ],
    ids=str,
)
def test_a_record_and_arguments_describe_the_whole_shape(given):
    shape = image_shape(**given)
    assert shape.img_size == ((24, 24) if "max_tokens" in given else given["img_size"])
    assert shape_of(shape.record()) == shape
    assert shape_of(shape.arguments()) == shape


def naflexvit():
    size = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 8}
    return timm.create_model("naflexvit_base_patch16_gap", num_classes=5, img_size=24, **size)


TAKEN = [naflexvit, lambda: relvit.retrofit(naflexvit()), lambda: small()]


@pytest.mark.parametrize("make", TAKEN)
def test_models_that_take_native_batches_keep_their_mode(make):
    model = make().train()
    image_shape(64, native=True, patch_size=8).check_model(model, 3)
    assert model.training


@pytest.mark.parametrize("make", TAKEN)
def test_features_of_native_batches_are_those_of_each_image(make):
    model, generator = make().eval(), torch.Generator().manual_seed(0)
    pictures = [torch.randn(3, 8 * h, 8 * w, generator=generator) for h, w in ((3, 5), (2, 2), (1, 7))]
    expected = torch.cat([pooled_features(model, picture[None]) for picture in pictures])
    torch.testing.assert_close(pooled_features(model, native_batch(pictures, 8)), expected, atol=1e-5, rtol=1e-5)


REFUSED = {
    "has patches of 8 x 16 px, the data of 8 x 8 px": lambda: small(patch_size=(8, 16)),
    "test_resnet takes no native images: use a relvit_": lambda: timm.create_model("test_resnet"),
    "test_vit takes no native images": lambda: timm.create_model("test_vit", patch_size=8),
    "its AFTFull has the bias of one grid": lambda: small("test_relvit_aft", mixer="full"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_take_none(message):
    with pytest.raises(ValueError, match=message):
        image_shape(64, native=True, patch_size=8).check_model(REFUSED[message](), 3)
