"""`set_reach`: models at other sizes compared with models with other tables and scales; refused arguments."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import retrofit_cases
import timm
import torch
from vits import assert_same, images, small

import relvit
from relvit.layers import Position
from relvit.models import attention_maps, set_reach

REACHES = ("stretch", "logn", "stretch-logn")
# Models for images of 24 x 16 pixels in patches of 8: 3 x 2 patches.
TRAINED, SIZES = (3, 2), [(24, 16), (40, 16), (8, 56)]


def own(**options):
    return small(rel_terms="qkvb", class_token=True, reg_tokens=1, max_distance=(2, 1), **options).double().eval()


MODELS = {
    "relvit": own,
    "relvit, absolute embedding": lambda: own(pos_embed="learn", shared_heads=False),
    **{
        name: lambda name=name: retrofit_cases.retrofitted(retrofit_cases.build(name), "qkvb", max_distance=(2, 1))
        for name in ("deit distilled", "dinov3")
    },
}


def by_hand(model, height, width, reach):
    """Return a copy whose tables NumPy has interpolated for the whole grid, with another scale."""
    model, grid = copy.deepcopy(model), (height // 8, width // 8)
    keys, trained_keys = (model.num_prefix_tokens + math.prod(size) for size in (grid, TRAINED))
    factor = math.log(keys) / math.log(trained_keys) if "logn" in reach else 1.0
    for block in model.blocks:
        block.attn.scale *= factor
        for name, table in list(block.attn.position.named_parameters()):
            number = table.detach().numpy()
            if "stretch" in reach:
                size, trained = (sizes[int("cols" in name)] for sizes in (grid, TRAINED))
                axis = -1 if "bias" in name else -2
                k, offsets = table.shape[axis] // 2, np.arange(1 - size, size) * trained / size
                number = np.apply_along_axis(partial(interpolate, offsets, k), axis, number)
            number = torch.from_numpy(number) * (factor if "bias" in name else 1.0)
            setattr(block.attn.position, name, torch.nn.Parameter(number))
    return model


def interpolate(offsets, k, row):
    return np.interp(offsets, range(-k, k + 1), row)


@pytest.mark.parametrize("name", MODELS)
def test_models_at_other_sizes(name):
    model = MODELS[name]()
    names, as_trained = list(model.state_dict()), {size: model(images(*size, dtype=torch.float64)) for size in SIZES}
    for reach in REACHES if name == "relvit" else REACHES[-1:]:
        assert set_reach(model, reach) is model
        for size in SIZES:
            x = images(*size, dtype=torch.float64)
            got = model(x)
            set_reach(model, "trained")
            torch.testing.assert_close(got, by_hand(model, *size, reach)(x), rtol=0, atol=1e-10)
            set_reach(model, reach)
            if size == SIZES[0]:
                assert torch.equal(got, as_trained[size])
            else:
                assert (got - as_trained[size]).abs().max() > 1e-4
    assert list(model.state_dict()) == names
    set_reach(model, "trained")
    assert all(torch.equal(model(images(*size, dtype=torch.float64)), as_trained[size]) for size in SIZES)


def test_slopes_at_other_sizes_and_a_size_of_training_that_the_model_was_not_built_for():
    model, built = small(position="slopes").eval(), small(position="slopes", img_size=(40, 48)).eval()
    x = images(16, 72)
    built.load_state_dict(model.state_dict())
    expected = set_reach(model, "stretch-logn")(x)
    assert_same(set_reach(built, "stretch-logn", trained_size=(24, 16))(x), expected, atol=0)
    assert (set_reach(built, "stretch-logn")(x) - expected).abs().max() > 1e-5


@pytest.mark.parametrize("reach", [*REACHES, "windows", "bands", "mirror"])
def test_at_the_trained_size_nothing_changes_with_padded_patches(reach):
    # The image has 3 x 2 whole patches; with padding at its edges it has 4 x 3.
    options = {"pos_embed": "learn"} if reach == "mirror" else {}
    model, x = small(img_size=(27, 20), dynamic_img_pad=True, **options).eval(), images(27, 20)
    expected = model(x)
    assert_same(set_reach(model, reach)(x), expected, atol=1e-6)


@pytest.mark.parametrize("reach", REACHES)
def test_copies_and_gradients(reach):
    model = set_reach(small(rel_terms="qkvb", class_token=True, depth=1).eval(), reach)
    copied = copy.deepcopy(model)
    for size in SIZES:
        x = images(*size)
        assert_same(copied(x), model(x), atol=0)
    model.train()(images(*SIZES[1])).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def original(case):
    return relvit.retrofit(retrofit_cases.build(case))


@pytest.mark.parametrize(
    ("make", "reach", "message"),
    [
        (small, "strech", r"reach is 'strech'; allowed are 'trained', .* \(did you mean 'stretch'\?\)"),
        (lambda: timm.create_model("test_vit"), "logn", "not for VisionTransformer, which .*: call relvit.retrofit"),
        (lambda: retrofit_cases.build("naflex"), "logn", "not for NaFlexVit, .*: take a model such as relvit_small$"),
        (
            lambda: retrofit_cases.build("swin"),
            "logn",
            "not for SwinTransformer, .*: take a model such as relvit_",
        ),
        (lambda: small("test_relvit_aft"), "stretch", "not for AFTVisionTransformer, which has no relative attention"),
        (partial(original, "naflex"), "stretch", "not for RetrofittedNaFlexVit, which has no patch_embed"),
        (
            lambda: torch.nn.Sequential(torch.nn.ModuleDict({"vit": original("dinov2")})),
            "stretch",
            r"Sequential, which has no patch_embed, .*: set the reach of model\[0\]\.vit, which has one",
        ),
        (lambda: small(rel_terms=""), "stretch", "without relative terms: there are no tables to stretch"),
        (
            lambda: small(position="low-rank"),
            "stretch-logn",
            "LowRankPosition2d, which cannot be .* trained_grid",
        ),
        (small, "mirror", "reach 'mirror' is not for RelVisionTransformer without .* embedding .* pos_embed='learn'"),
        (MODELS["dinov3"], "stretch-mirror", "not for RetrofittedEva without a learned absolute embedding"),
        (partial(original, "beit"), "mirror", "not for RetrofittedBeit without a learned absolute embedding"),
        (partial(original, "sam absolute"), "mirror", "not for RetrofittedSam without .* that can be mirrored"),
        (partial(original, "swin"), "mirror", "not for RetrofittedSwin, which has no relative attention to all tokens"),
        (
            lambda: small(img_size=8),
            "logn",
            "not for RelVisionTransformer trained on a single token: take reach 'trained'",
        ),
    ],
)
def test_refusals_change_nothing(make, reach, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        set_reach(model, reach)
    attentions = [part for part in model.modules() if hasattr(part, "trained_keys")]
    assert all(part.trained_keys is None for part in attentions)
    assert set_reach(model, "trained") is model


def test_a_trained_size_is_one_that_the_model_takes():
    model = small(patch_size=(8, 16), img_size=(24, 32), rel_terms="kb")
    # Images in training may have had one row of patches, lower than a patch is wide.
    assert set_reach(model, "stretch", (8, 64)).blocks[0].attn.position.trained_grid == (1, 4)
    with pytest.raises(ValueError, match="image height 30 is not a multiple of the patch size 8: use 24 or 32"):
        set_reach(model, "stretch", (30, 32))
    padded = small(img_size=(24, 16), dynamic_img_pad=True)
    assert set_reach(padded, "stretch", (30, 4)).blocks[0].attn.position.trained_grid == (4, 1)


@pytest.mark.parametrize("case", ["dinov2", "beit", "relpos"])
def test_the_advice_to_retrofit_a_model_works(case):
    model = retrofit_cases.build(case)
    with pytest.raises(ValueError, match=r"to all tokens: call relvit.retrofit\(model\) first"):
        set_reach(model, "logn")
    set_reach(relvit.retrofit(model), "logn")


def test_attention_maps_have_the_reach():
    model = own()
    x = images(40, 16, dtype=torch.float64)
    expected = attention_maps(by_hand(model, 40, 16, "stretch-logn"), x).weights
    assert_same(attention_maps(set_reach(model, "stretch-logn"), x).weights, expected, atol=1e-6)


class Outer(Position):
    """A position of a user that has another position inside."""

    stretchable = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, grid):
        return self.inner(grid)


def test_a_position_inside_of_a_position_is_stretched():
    model = own()
    x = images(40, 16, dtype=torch.float64)
    expected = by_hand(model, 40, 16, "stretch")(x)
    for block in model.blocks:
        block.attn.position = Outer(block.attn.position)
    assert_same(set_reach(model, "stretch")(x), expected, atol=1e-6)
    assert all(block.attn.position.inner.trained_grid is None for block in set_reach(model, "trained").blocks)


def test_a_temperature_needs_no_tables():
    model = small(rel_terms="").eval()
    x = images(40, 16)
    expected = by_hand(model, 40, 16, "logn")(x)
    torch.testing.assert_close(set_reach(model, "logn")(x), expected, rtol=0, atol=1e-5)


def retrofitted_vit():
    plain = timm.create_model("test_vit", img_size=(24, 16), patch_size=8, class_token=False, global_pool="avg")
    model = relvit.retrofit(plain, rel_terms="qkvb", max_distance=(2, 1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.double().eval()


@pytest.mark.parametrize(
    "make",
    [
        lambda: small(rel_terms="qkvb", max_distance=(2, 1)).double().eval(),
        lambda: small(position="slopes", rope="axial", embed_dim=16).double().eval(),
        lambda: small(position="cpb", rope="mixed", embed_dim=16).double().eval(),
        retrofitted_vit,
    ],
)
@pytest.mark.parametrize("size", [(24, 16), (48, 16), (56, 40), (8, 72)])
def test_windows_are_attention_with_a_mask(make, size):
    """The mask hides all tokens outside of the window of 3 x 2 patches, in images of whole windows or others."""
    model = make()
    x, (height, width) = images(*size, dtype=torch.float64), (size[0] // 8, size[1] // 8)
    rows, columns = torch.meshgrid(torch.arange(height) // 3, torch.arange(width) // 2, indexing="ij")
    window = (rows * width + columns).flatten()
    expected = model.forward_features(x, attn_mask=window[:, None] == window)
    before = model.forward_features(x)
    got = set_reach(model, "windows").forward_features(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert torch.equal(got, before) == (size == (24, 16))
    got.square().sum().backward()
    assert all(
        parameter.grad is not None for name, parameter in model.named_parameters() if name[:4] not in ("head", "fc_n")
    )


def test_windows_refuse():
    with pytest.raises(ValueError, match="with a class token or registers, which belong to no window: take another"):
        set_reach(small(class_token=True), "windows")
    with pytest.raises(ValueError, match="with a rotary embedding: take another reach"):
        set_reach(retrofit_cases.retrofitted(retrofit_cases.build("rope axial", class_token=False)), "windows")
    model = set_reach(small().eval(), "windows")
    keep = torch.tensor([[0, 5]])
    with pytest.raises(ValueError, match="no keep and no patch_drop_rate, or call set_reach"):
        model.forward_features(images(48, 32, batch=1), keep=keep)
    with pytest.raises(ValueError, match="within windows has no N x N weights"):
        attention_maps(model, images(40, 40))
    model.blocks[1].attn.window = None  # as in ViTDet, whose blocks between those with windows are global
    assert attention_maps(model, images(40, 40), layers=[1]).weights[0].shape[-2:] == (25, 25)
    with pytest.raises(ValueError, match="within windows has no N x N weights"):
        attention_maps(model, images(40, 40), layers=[0, 1])
    with pytest.raises(ValueError, match="is not causal"):
        model.forward_features(images(40, 40), is_causal=True)
