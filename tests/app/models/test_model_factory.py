"""`build_model`: it checks arguments by name, and refuses models larger than the memory before it allocates memory."""

import math
import re
import resource

import pytest
import timm
import torch
from vits import class_of

from relvit.app.models import build_model, described_model, model_arguments
from relvit.families.aft import AFTVisionTransformer
from relvit.layers import SlopePosition2d
from relvit.models import GridVisionTransformer, RelVisionTransformer


def test_builds_relvit_and_timm_models_with_the_datas_sizes():
    ours = build_model("test_relvit", 3, 1, (16, 32), {"depth": 1, "rel_terms": "k"})
    assert ours.head.out_features == 3
    assert ours.patch_embed.proj.in_channels == 1
    assert ours.patch_embed.img_size == (16, 32)
    theirs = build_model("test_vit", 4, 3, 64, {"drop_path_rate": 0.1})
    assert theirs.patch_embed.img_size == (64, 64)
    # ResNets have no argument img_size, which is then left out.
    assert build_model("test_resnet", 4, 3, 64).num_classes == 4


def test_a_model_whose_function_declares_no_class_gets_the_size_of_the_images():
    """Timm's Hiera is such a model: it was built for its registered size."""
    assert build_model("hiera_tiny_224", 4, 3, (64, 96), {"stages": (1, 1, 1, 1)}).tokens_spatial_shape == [16, 24]
    # The class of this model has no argument img_size, which is then left out.
    assert build_model("inception_next_atto", 4, 3, 64, {"depths": (1, 1, 1, 1)}).num_classes == 4


def test_every_registered_relvit_model_knows_its_arguments():
    own = {
        AFTVisionTransformer: {"mixer", "kernel_size", "window", "bias_dim"},
        RelVisionTransformer: {"rel_terms", "max_distance"},
        GridVisionTransformer: {"pos_embed", "reversible", "img_size", "embed_dim", "drop_path_rate"},
    }
    for name in timm.list_models("*relvit*"):
        for model_class, arguments in own.items():
            assert arguments <= model_arguments(name) or not issubclass(class_of(name), model_class), name


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("relvit_smal", {}, "unknown model 'relvit_smal' .did you mean 'relvit_small'"),
        ("relvit_small", {"rel_termz": "k"}, "has no argument 'rel_termz' .did you mean 'rel_terms'"),
        ("vit_tiny_patch16_224", {"embed_dimm": 4}, "did you mean 'embed_dim'"),
        (
            "relvit_aft_conv_tiny",
            {"max_distance": 3},
            "has no argument 'max_distance': it is for relvit's models with attention, .*; take it out of model_kwargs",
        ),
        ("relvit_small", {"num_classes": 4}, "model_kwargs must not hold 'num_classes': it comes from the data"),
        (
            "vit_tiny_patch16_224.augreg_in21",
            {},
            "^there are no weights 'vit_tiny_patch16_224.augreg_in21' .did you mean 'vit_tiny_patch16_224.augreg_in21k'"
            ".*; known: .*: give one of these, or vit_tiny_patch16_224 without a tag$",
        ),
        ("test_relvit.in1k", {}, "'test_relvit.in1k'; known: 'test_relvit.untrained': give one of these, or test_relv"),
        ("hf-hub:timm/vit_tiny.x", {}, "unknown model 'hf-hub:timm/vit_tiny.x' .--pretrained takes such weights, and"),
    ],
)
def test_errors_hold_the_nearest_right_name(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, 10, model_kwargs=kwargs)


def test_a_retrofit_follows_when_asked_for():
    assert not hasattr(build_model("test_vit", 4, 3, 64).blocks[0].attn, "position")
    model = build_model("test_vit", 4, 3, 64, retrofit={"rel_terms": "k", "max_distance": [2, 3]})
    assert model.blocks[1].attn.position.max_distance == (2, 3)
    assert build_model("test_vit", 4, 3, 64, retrofit={}).blocks[0].attn.position.rel_terms == "kv"
    by_name = build_model("test_vit", 4, 3, 64, retrofit={"position": "slopes"})
    assert isinstance(by_name.blocks[0].attn.position, SlopePosition2d)
    with pytest.raises(ValueError, match=r"position is 'slops'; allowed are .* .did you mean 'slopes'"):
        build_model("test_vit", 4, retrofit={"position": "slops"})
    with pytest.raises(ValueError, match=r"retrofit has no argument 'rel_term' .did you mean 'rel_terms'"):
        build_model("test_vit", 4, retrofit={"rel_term": "k"})
    with pytest.raises(ValueError, match="ResNet cannot be retrofitted"):
        build_model("test_resnet", 4, retrofit={"rel_terms": "k"})


@pytest.mark.parametrize(
    ("name", "retrofit", "message"),
    [
        ("relvit_small", {"rel_terms": "kv"}, "give its own arguments, such as --model.model_kwargs.rel_terms, and"),
        ("relvit_small", {"drop_rate": 0.1}, "retrofit has no argument 'drop_rate'"),
        ("relvit_small.tag", {}, "such as --model.model_kwargs.rel_terms, and leave retrofit out"),
        ("test_relvit", {"max_distance": 3}, "such as --model.model_kwargs.max_distance, and leave retrofit out"),
        ("relvit_aft_conv_small", {"rel_terms": "kv"}, "nothing to retrofit: leave retrofit out"),
    ],
)
def test_relvits_models_have_arguments_instead_of_a_retrofit(name, retrofit, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_model(name, 4, retrofit=retrofit)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"depth": 10**9}, "depth is 1e.09; a model.s numbers may be at most 1000"),
        ({"max_distance": [3, 10**9]}, "max_distance is 1e.09; a model.s numbers may be at most"),
        ({"mlp_ratio": math.inf}, "mlp_ratio is inf; a model.s numbers"),
        ({"mlp_ratio": math.nan}, "mlp_ratio is nan; a model.s numbers"),
        ({"mlp_ratio": 1e5, "embed_dim": 960}, "the model needs .* GiB of memory, .* are available"),
        ({"embed_dim": 96_000, "depth": 2, "num_heads": 1000}, "GiB of memory, .* are available"),
    ],
)
def test_a_model_larger_than_the_memory_is_refused_before_it_takes_any(kwargs, message):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message):
        build_model("relvit_tiny", 7, model_kwargs=kwargs)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e5  # `ru_maxrss` is in KiB.


def test_numbers_anywhere_among_the_arguments_are_checked():
    for name, classes, kwargs, retrofit in (
        ("test_vit", 10**9, {}, None),
        ("test_vit", 7, {}, {"max_distance": 10**9}),
        ("test_resnet", 7, {"layers": [600, 600, 1, 1]}, None),
    ):
        with pytest.raises(ValueError, match="numbers may be at most"):
            build_model(name, classes, model_kwargs=kwargs, retrofit=retrofit)


def test_the_check_changes_no_random_numbers(monkeypatch):
    kwargs = {"depth": 2, "embed_dim": 48}
    torch.manual_seed(0)
    expected = timm.create_model("relvit_tiny", num_classes=7, **kwargs).state_dict()
    torch.manual_seed(0)
    model = build_model("relvit_tiny", 7, model_kwargs=kwargs)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    size = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr("relvit.app.models.model_factory.available_memory", lambda: size)
    build_model("relvit_tiny", 7, model_kwargs=kwargs)
    monkeypatch.setattr("relvit.app.models.model_factory.available_memory", lambda: size - 1)
    with pytest.raises(ValueError, match=r"GiB of memory, .* are available"):
        build_model("relvit_tiny", 7, model_kwargs=kwargs)


def test_naflexvit_knows_the_arguments_of_its_configuration():
    small = {"depth": 1, "embed_dim": 48, "num_heads": 4, "drop_path_rate": 0.1}
    assert build_model("naflexvit_base_patch16_gap", 3, 3, None, small).embed_dim == 48
    with pytest.raises(ValueError, match=r"has no argument 'drop_paths' .did you mean 'drop_path_rate'"):
        build_model("naflexvit_base_patch16_gap", 3, 3, None, {"drop_paths": 0.1})


def test_a_published_description_becomes_the_arguments_of_build_model():
    given = {"num_classes": 5, "img_size": 32, "depth": 2}
    assert described_model("test_vit", given, "config.json") == ("test_vit", {"depth": 2}, None)
    inner = {"model": "test_vit", "retrofit": {"rel_terms": "k"}}
    assert described_model("retrofitted", given | inner, "it") == ("test_vit", {"depth": 2}, {"rel_terms": "k"})


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("retrofitted", {"retrofit": {}}, "lacks 'model': add the name of the timm model"),
        ("retrofitted", {"model": "test_vitt"}, "did you mean 'test_vit'"),
        ("test_vit", {"pretrained": True}, "it must not hold 'pretrained'"),
    ],
)
def test_a_published_description_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        described_model(name, arguments, "it")


@pytest.mark.parametrize("kwargs", [{"num_heads": 5}, {"embed_dim": 0}, {"depth": "x"}])
def test_a_model_of_timm_that_cannot_be_built(kwargs):
    with pytest.raises(ValueError, match=r"model 'vit_tiny_patch16_224' cannot be built with model_kwargs \{'"):
        build_model("vit_tiny_patch16_224", 3, model_kwargs=kwargs)
    assert build_model("vit_tiny_patch16_224", 3, model_kwargs={"depth": 1, "num_heads": 2}).num_classes == 3


def test_the_size_of_the_images_is_no_argument_that_the_user_gave():
    with pytest.raises(ValueError, match=r"^model 'nest_tiny' cannot be built for images of \(50, 50\) px: `patch_s"):
        build_model("nest_tiny", 3, img_size=(50, 50))
    with pytest.raises(ValueError, match=r"built with model_kwargs \{'drop_rate': 0.1\} for images of 50 px: `patch_s"):
        build_model("nest_tiny", 3, img_size=50, model_kwargs={"drop_rate": 0.1})


def test_arguments_are_given_by_name():
    with pytest.raises(TypeError, match=r"model_kwargs must hold arguments by name, .* got \[\('depth', 1\)\]"):
        build_model("test_vit", 3, model_kwargs=[("depth", 1)])


def test_a_class_that_only_type_checkers_know_is_unknown(monkeypatch):
    def of_my_own(pretrained: bool = False, **kwargs) -> "Nowhere":  # noqa: F821
        return timm.create_model("test_vit", **kwargs)

    monkeypatch.setitem(timm.models._registry._model_entrypoints, "of_my_own", of_my_own)
    assert model_arguments("of_my_own") == set()
    assert build_model("of_my_own", 3, 1, 64, {"drop_rate": 0.1}).patch_embed.img_size == (64, 64)
