"""All families refuse numbers that no model has, and inputs that are not images; errors say what is allowed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from own_positions import mvit
from retrofit_cases import build
from timm.models.vision_transformer import Block, VisionTransformer
from timm_versions import needs_timm
from vits import FAMILIES, SMALL, images, small

import relvit
from relvit.families.transformer_xl import set_bands
from relvit.models import GridVisionTransformer, attention_rollout, logit_inputs, param_groups, set_reach

EVERY = ["test_relvit", *FAMILIES]
WRONG = {
    "num_heads": (5, "num_heads must divide dim 12, got 5"),
    "embed_dim": (0, "embed_dim must be 1 or more, got 0"),
    "depth": (-1, r"depth\)? must be (an integer, )?1 or more, got -1"),
    "patch_size": (0, "patch_size must be 1 or more, got 0"),
    "mlp_ratio": (-1, "mlp_ratio must be positive, got -1"),
    "drop_path_rate": (2, "drop_path_rate must be in 0 <= x <= 1, got 2"),
    "patch_drop_rate": (1, "patch_drop_rate must be in 0 <= x < 1, got 1"),
}


def test_an_image_size_that_the_model_refuses():
    for size in ((20, 16), 4):
        with pytest.raises(ValueError, match=r"image height .* multiple of the patch size 8: use .*dynamic_img_pad"):
            small("relvit_tiny", img_size=size)
    # The option that the error suggests works.
    padded = small("relvit_tiny", img_size=(20, 16), dynamic_img_pad=True)
    assert padded(images(20, 16)).shape == small("relvit_tiny", img_size=(24, 16))(images()).shape


@pytest.mark.parametrize("retrofitted", [False, True])
def test_an_input_size_that_the_model_would_refuse_later(retrofitted):
    model = VisionTransformer(**SMALL) if retrofitted else small("relvit_tiny", pos_embed="learn")
    model = relvit.retrofit(model) if retrofitted else model
    for size in ({"img_size": (28, 16)}, {"img_size": 28}, {"patch_size": 5}):
        with pytest.raises(ValueError, match=r"image height (28|24) is not a multiple of the patch size (8: use 24|5)"):
            model.set_input_size(**size)
    assert model.patch_embed.img_size == (24, 16)
    assert model(images()).shape == (2, 5)


OF_TIMM = ("siglip", "eva", "naflex", "beit", "sam", "swin")
CHANGED = {
    "relvit": lambda: small(pos_embed="learn"),
    "relvit, tables per axis": lambda: small(pos_embed="axial"),
    "mvit": lambda: relvit.retrofit(mvit("patches")),
    **{case: lambda case=case: relvit.retrofit(build(case)) for case in OF_TIMM},
}


def state(model):
    return {name: repr(vars(part)) for name, part in model.named_modules()}


@needs_timm("1.0.31")
@pytest.mark.parametrize("name", CHANGED)
def test_a_classifier_that_the_model_cannot_have_does_not_change_it(name):
    model = CHANGED[name]()
    before = state(model)
    for given, kind, message in (
        ((7, "avgmx"), ValueError, "cannot get global_pool 'avgmx': .*ool.*; leave it out, or create a new model"),
        (("7", "avg"), TypeError, "num_classes must be an integer, got '7'"),
        ((2.5, "avg"), TypeError, "num_classes must be an integer, got 2.5"),
        ((-1,), ValueError, "num_classes must be at least 0, got -1"),
    ):
        with pytest.raises(kind, match=message):
            model.reset_classifier(*given)
        assert state(model) == before


@needs_timm("1.0.31")
@pytest.mark.parametrize("name", ["relvit", "relvit, tables per axis", "siglip", "eva", "beit", "swin"])
def test_an_input_size_that_no_model_has_does_not_change_it(name):
    model = CHANGED[name]()
    before = state(model)
    for given, kind, message in (
        ({"img_size": 24 * 1.5}, TypeError, "img_size must hold integers, got 36.0"),
        ({"img_size": (0, 0)}, ValueError, r"img_size must be at least 1, got \(0, 0\)"),
        ({"img_size": (24, 16, 3)}, ValueError, r"img_size must be an int or \(rows, columns\)"),
        ({"patch_size": 0}, ValueError, "patch_size must be at least 1, got 0"),
        ({"img_size": 32, "patch_size": 4.0}, TypeError, "patch_size must hold integers, got 4.0"),
    ):
        with pytest.raises(kind, match=message):
            model.set_input_size(**given)
        assert state(model) == before


@needs_timm("1.0.31")
def test_windows_that_no_model_has_do_not_change_it():
    model = CHANGED["swin"]()
    before = state(model)
    for given, kind, message in (
        ({"window_size": 2.5}, TypeError, "window_size must be an integer, got 2.5"),
        ({"img_size": 48, "window_size": [(2, 3), (2, 2.5)]}, TypeError, "window_size must be an integer, got 2.5"),
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"window_ratio": 1.5}, TypeError, "window_ratio must be an integer, got 1.5"),
    ):
        with pytest.raises(kind, match=message):
            model.set_input_size(**given)
        assert state(model) == before
    model.set_input_size(48, window_size=[(2, 3), 2])
    assert [*model.windows().values()][:: len(model.windows()) - 1] == [(2, 3), (2, 2)]


@pytest.mark.parametrize("name", WRONG)
def test_numbers(name):
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        small("relvit_tiny", **{name: given})


@pytest.mark.parametrize("family", EVERY)
def test_every_family_checks_its_numbers_and_inputs(family):
    with pytest.raises(ValueError, match="num_heads must divide dim 12, got 5"):
        small(family, num_heads=5)
    model = small(family).eval()
    with pytest.raises(ValueError, match=r"must be \(B, 3, height, width\), got \(1, 4, 24, 16\)"):
        model(torch.zeros(1, 4, 24, 16))
    assert model(images()).shape == (2, 5)


INPUTS = [
    (np.zeros((1, 3, 24, 16), dtype=np.float32), TypeError, r"a tensor \(B, 3, height, width\), got ndarray"),
    (None, TypeError, "got NoneType"),
    (torch.zeros(3, 24, 16), ValueError, r"got \(3, 24, 16\); for a single image give image\[None\]"),
    (torch.zeros(1, 1, 3, 24, 16), ValueError, r"must be \(B, 3, height, width\), got \(1, 1, 3, 24, 16\)"),
    (torch.zeros(1, 4, 24, 16), ValueError, r"must be \(B, 3, height, width\), got \(1, 4, 24, 16\)"),
    (torch.zeros(1, 3, 24, 16, dtype=torch.uint8), TypeError, "normalised floating numbers, got torch.uint8"),
]


@pytest.mark.parametrize(("given", "kind", "message"), INPUTS, ids=range(len(INPUTS)))
def test_inputs(given, kind, message):
    with pytest.raises(kind, match=message):
        small("relvit_tiny").eval()(given)


@pytest.mark.parametrize("path", [3, None, [1]])
def test_what_is_no_path(path):
    with pytest.raises(TypeError, match="ckpt_path must be the path of a checkpoint, got "):
        relvit.load(path)


OF_A_MODEL = {
    "retrofit": relvit.retrofit,
    "restore": relvit.restore,
    "explain": relvit.explain,
    "attention_maps": lambda model: relvit.attention_maps(model, images()),
    "attention_rollout": lambda model: attention_rollout(model, images()),
    "logit_inputs": lambda model: logit_inputs(model, images()),
    "set_reach": lambda model: set_reach(model, "stretch"),
    "set_bands": lambda model: set_bands(model, 2),
    "param_groups": lambda model: param_groups(model, lr=0.1),
}


@pytest.mark.parametrize("call", OF_A_MODEL.values(), ids=OF_A_MODEL)
def test_a_name_or_a_class_in_place_of_a_model(call):
    create = r"; create the model first, with timm\.create_model\(\.\.\.\)$"
    with pytest.raises(TypeError, match=f"^model must be a module, got 'relvit_tiny'{create}"):
        call("relvit_tiny")
    with pytest.raises(TypeError, match=f"^model must be a module, got the class RelVisionTransformer{create}"):
        call(relvit.RelVisionTransformer)
    with pytest.raises(TypeError, match=r"got SimpleNamespace; give its attribute model$"):
        call(SimpleNamespace(model=small()))
    with pytest.raises(TypeError, match=r"^model must be a module, got NoneType$"):
        call(None)


@pytest.mark.parametrize("given", [{}, {"block_fn": Block}])
def test_blocks_that_take_no_grid(given):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
    with pytest.raises(
        TypeError, match=r"block_fn must make GridBlocks, got a Block: give block_fn=partial\(MixerBlock"
    ):
        GridVisionTransformer(**sizes, **given)


def test_a_loop_over_blocks_that_gives_them_no_grid():
    model = small().eval()
    with pytest.raises(TypeError, match=r"RelativeBlock needs the grid .* forward_intermediates, .* model\.embed"):
        model.blocks[0](torch.zeros(2, 6, 12))
    tokens, grid = model.embed(images())
    for block in model.blocks:
        tokens = block(tokens, grid)
    torch.testing.assert_close(model.norm(tokens), model.forward_features(images()))


def test_images_of_a_stem_whose_number_of_channels_is_not_known():
    model = small().eval()
    model.patch_embed.proj = torch.nn.Sequential(torch.nn.Conv2d(4, 12, 8, 8))
    assert model(images(channels=4)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"must be \(B, in_chans, height, width\), got \(4, 24, 16\)"):
        model(images(channels=4)[0])


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("embed_dim", "two", TypeError, "embed_dim must be a number, got 'two'"),
        ("img_size", "32", TypeError, "img_size must be a number, got '32'"),
        ("img_size", (3, 32, 32), ValueError, r"img_size must be an int or \(rows, columns\), got \(3, 32, 32\)"),
        ("patch_size", (8, 8, 3), ValueError, r"patch_size must be an int or \(rows, columns\)"),
        ("stages", 4, TypeError, r"has no argument 'stages'; help\(relvit\.\S+\) lists its arguments"),
    ],
)
def test_arguments_of_another_type(family, name, given, error, message):
    with pytest.raises(error, match=message):
        small(family, **{name: given})


@pytest.mark.parametrize("name", ["position", "pos_embed"])
def test_rotary_embeddings_have_an_argument_of_their_own(name):
    with pytest.raises(ValueError, match=f"{name} is 'rope': rotary embeddings have .*: rope='axial' or 'mixed'"):
        small("relvit_tiny", **{name: "rope"})
