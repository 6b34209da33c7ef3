"""`timm.create_model('retrofitted', ...)`: timm makes, saves and loads models after `relvit.retrofit`."""

import copy

import pytest
import timm
import torch
from timm.models import VisionTransformer, save_for_hf
from timm.utils import ModelEmaV3
from timm_versions import needs_timm

import relvit

ARGUMENTS = {"rel_terms": "kb", "max_distance": (1, 2), "abs_pos": "freeze"}
SIZE = {"img_size": (32, 48), "num_classes": 5}


@pytest.fixture(scope="module")
def trained():
    """A retrofitted model with large random weights."""
    torch.manual_seed(0)
    model = relvit.retrofit(timm.create_model("test_vit", in_chans=1, **SIZE), **ARGUMENTS).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_for_hf(trained, folder, safe_serialization=True)
    return f"local-dir:{folder}"


@needs_timm("1.0.31")
def test_saved_and_loaded(trained, folder):
    again = timm.create_model(folder, pretrained=True).eval()
    x = torch.randn(2, 1, 48, 80)
    assert torch.equal(again(x), trained(x))
    assert not again.pos_embed.requires_grad
    # The loaded model has the arguments, too, so that it can be saved again.
    assert again._model_args["retrofit"] == {**ARGUMENTS, "max_distance": [1, 2]}
    assert again.pretrained_cfg["architecture"] == again.default_cfg["architecture"] == "retrofitted"


@needs_timm("1.0.31")
def test_loaded_for_other_classes_channels_and_sizes(trained, folder):
    other = timm.create_model(folder, pretrained=True, num_classes=3, in_chans=3, img_size=(48, 80)).eval()
    assert other.head.out_features == 3
    # For more channels timm repeats the weight of one channel, and divides it by the number of channels.
    weight = trained.patch_embed.proj.weight
    torch.testing.assert_close(other.patch_embed.proj.weight, weight.repeat(1, 3, 1, 1) / 3)
    assert other.pos_embed.shape[1] == 1 + 3 * 5
    x = torch.randn(2, 1, 48, 80)
    expected = trained.forward_features(x)
    torch.testing.assert_close(other.forward_features(x.expand(-1, 3, -1, -1)), expected, rtol=1e-4, atol=1e-4)


@needs_timm("1.0.31")
def test_features_only_of_a_published_model_are_its_intermediates(trained, folder):
    x = torch.randn(2, 1, 48, 80)
    for options in ({}, {"out_indices": (0, 2)}, {"out_indices": 2}):
        features = timm.create_model(folder, pretrained=True, features_only=True, **options).eval()
        indices = options.get("out_indices", 3)
        expected = trained.forward_intermediates(x, indices, intermediates_only=True)
        assert len(features(x)) == len(expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(features(x), expected, strict=True))
        assert features.feature_info.channels() == [64] * len(expected)
        assert "classifier" not in features.pretrained_cfg
        # timm's transforms read these traits: grey images of any size, by default of 32 x 48 px.
        wanted = {"input_size": (1, 32, 48), "fixed_input_size": False, "first_conv": "patch_embed.proj"}
        config = timm.models.get_model_input_config
        assert config(features) == config(trained) == wanted


@pytest.mark.parametrize("feature_cls", ["hook", "fx"])
def test_features_by_hooks_and_by_a_graph_are_tokens(feature_cls):
    made = []
    for name in ("getter", feature_cls):
        torch.manual_seed(0)
        options = {"features_only": True, "feature_cls": name, "out_indices": (0, 2), **SIZE}
        made.append(timm.create_model("retrofitted", model="test_vit", **options).eval())
    getter, other = made
    x = torch.randn(2, 3, 32, 48)
    for tokens, maps in zip(other(x), getter(x), strict=True):
        torch.testing.assert_close(tokens[:, 1:].transpose(1, 2), maps.flatten(2))


@pytest.mark.parametrize("case", ["vit", "beit"])
@pytest.mark.parametrize("options", [{}, {"num_classes": -1}])
def test_pretrained_path_of_timms_train_script_loads_tables(case, options, tmp_path):
    name = {"vit": "test_vit", "beit": "beit_base_patch16_224"}[case]
    arguments = {"embed_dim": 16, "depth": 2, "num_heads": 2, **SIZE}
    trained = timm.create_model("retrofitted", model=name, **arguments).eval()
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "last.pth.tar")
    overlay = {"file": str(tmp_path / "last.pth.tar"), "num_classes": 5, **options}
    made = timm.create_model("retrofitted", True, pretrained_cfg_overlay=overlay, model=name, **arguments).eval()
    x = torch.randn(2, 3, 48, 80)
    assert torch.equal(made.forward_features(x), trained.forward_features(x))
    # As in timm, the classifier is new if the number of classes is negative.
    assert torch.equal(made(x), trained(x)) == (not options)


@needs_timm("1.0.31")
@pytest.mark.parametrize("kind", ["bias", "mlp"])
def test_tables_that_layers_share_are_saved_and_averaged_once(kind, tmp_path):
    arguments = {"rel_pos_type": kind, "shared_rel_pos": True, **SIZE}
    model, x = relvit.retrofit(timm.create_model("test_vit_relpos", **arguments)).eval(), torch.randn(2, 3, 48, 80)
    average = ModelEmaV3(model, decay=0.25, foreach=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mean = {
        name: 0.25 * former + 0.75 * model.get_parameter(name) for name, former in average.module.named_parameters()
    }
    average.update(model)
    for name, parameter in average.module.named_parameters():
        torch.testing.assert_close(parameter, mean[name])
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    # The same holds for a model that is part of another model.
    fresh = relvit.retrofit(timm.create_model("test_vit_relpos", **arguments)).eval()
    torch.nn.Sequential(fresh).load_state_dict(torch.nn.Sequential(model).state_dict())
    assert torch.equal(fresh(x), model(x))


@needs_timm("1.0.31")
@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_srelpos_small_patch16_224", "swinv2_tiny_window8_256"])
def test_models_of_another_size_are_saved_and_restored_ones_keep_their_description(name, tmp_path):
    stages = {"depths": (1, 1), "num_heads": (1, 2), "window_size": 3, "img_size": 24}
    options = stages if name.startswith("swin") else {"depth": 2, "num_heads": 2, "img_size": 48}
    model = timm.create_model(name, embed_dim=16, num_classes=5, **options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    restored = relvit.restore(_changed(relvit.retrofit(copy.deepcopy(model))))
    assert restored._model_args == _changed(copy.deepcopy(model))._model_args
    side, x = 2 * options["img_size"], torch.randn(2, 3, 96, 96)
    relvit.retrofit(model).set_input_size((side, side))
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))


def _changed(model):
    model.reset_classifier(3, "token" if "Beit" in type(model).__name__ else "avg")
    return model


@needs_timm("1.0.31")
def test_models_made_by_their_class_and_resized_by_timm_have_no_description():
    model = VisionTransformer(img_size=32, embed_dim=24, depth=1, num_heads=2)
    model.set_input_size(48)
    assert "retrofit" not in relvit.retrofit(model)._model_args


def test_features_only_of_stages():
    small = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 3, "img_size": 48}
    features = timm.create_model("retrofitted", model="swin_tiny_patch4_window7_224", features_only=True, **small)
    assert [tuple(part.shape) for part in features(torch.randn(1, 3, 48, 32))] == [(1, 8, 12, 8), (1, 16, 6, 4)]
    assert features.feature_info.reduction() == [4, 8]


def test_made_by_name_from_weights_without_tables(tmp_path):
    plain = timm.create_model("test_vit", **SIZE).eval()
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    overlay = {"file": str(tmp_path / "plain.pth"), "num_classes": 5}
    options = {"retrofit": {"max_distance": 2}, "pretrained_cfg_overlay": overlay, **SIZE}
    made = timm.create_model("retrofitted", model="test_vit", pretrained=True, **options).eval()
    x = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(made(x), plain(x))
    assert made.blocks[0].attn.position.max_distance == (2, 2)
    by_hand = relvit.retrofit(copy.deepcopy(plain), max_distance=2)
    assert made.state_dict().keys() == by_hand.state_dict().keys()
    assert type(made) is type(by_hand)


@needs_timm("1.0.31")
def test_what_cannot_be_saved_or_made(tmp_path):
    own = relvit.retrofit(timm.create_model("test_vit"), position=relvit.layers.SlopePosition2d)
    with pytest.raises(ValueError, match="Model argument 'retrofit' is not serializable"):
        save_for_hf(own, tmp_path)
    with pytest.raises(ValueError, match="ResNet cannot be retrofitted"):
        timm.create_model("retrofitted", model="test_resnet")


def test_arguments_of_the_registered_name():
    with pytest.raises(
        ValueError, match=r"model= is missing, the name of the timm model .* model='vit_small_patch16_224'"
    ):
        timm.create_model("retrofitted")
    vit = timm.create_model("test_vit")
    with pytest.raises(TypeError, match=r"name of a timm model, got a VisionTransformer: .* by relvit.retrofit.model."):
        timm.create_model("retrofitted", model=vit)
    with pytest.raises(TypeError, match=r"arguments of relvit.retrofit, such as {'rel_terms': 'kv'}, got 'kv'"):
        timm.create_model("retrofitted", model="test_vit", retrofit="kv")
    with pytest.raises(ValueError, match="feature_cls is 'hooks'; allowed are 'getter', 'hook', 'fx'"):
        timm.create_model("retrofitted", model="test_vit", features_only=True, feature_cls="hooks")
    with pytest.raises(TypeError, match=r"retrofit has no argument 'rel_term' .did you mean 'rel_terms'"):
        timm.create_model("retrofitted", model="test_vit", retrofit={"rel_term": "kv"})
    with pytest.raises(
        TypeError, match=r"max_distance is an argument of relvit.retrofit: give retrofit={'max_distance': 3}"
    ):
        timm.create_model("retrofitted", model="test_vit", max_distance=3)
