"""Weights transferred from one classifier into another: outputs, tensors and the report."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm_versions import needs_timm
from transfers import SIZE, make, pictures, weights_of

from relvit.models import retrofit
from relvit.models.weights.transfer import Weights, transfer_weights

KWARGS = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
PLAIN = {"class_token": True, "global_pool": "token", "pos_embed": "learn"}


def test_the_same_classes_in_another_order_keep_the_classifier():
    there, here = make(), make(seed=1)
    report = transfer_weights(here, weights_of(there, class_names=["ant", "bee", "cow"]), ["cow", "ant", "bee"])
    images = pictures(2, 3, *SIZE)
    torch.testing.assert_close(here(images), there(images)[:, [2, 0, 1]])
    assert report.reordered
    assert (report.resized, report.new, report.skipped) == ([], [], [])
    assert str(report) == f"{len(here.state_dict())} of {len(here.state_dict())} tensors from there, " + (
        "the classifier's rows in the order of the classes here"
    )


def test_names_that_are_not_those_of_the_rows_move_no_rows():
    there, here = make(), make(seed=1)
    names = ["ant", "bee", "cow", "dog"]
    assert not transfer_weights(here, weights_of(there, class_names=names), names[::-1]).reordered
    assert torch.equal(here.head.weight, there.head.weight)


@pytest.mark.parametrize("classes", [3, 384])
def test_a_norm_in_the_classifier_has_no_rows_of_classes(classes):
    """LeViT's classifier has a batch norm of 384 channels before the last layer."""
    there, here = (timm.create_model("levit_128s", num_classes=classes) for _ in range(2))
    torch.nn.init.normal_(there.head.bn.weight)
    names = [f"class {number}" for number in range(classes)]
    order = [classes - 1, *range(classes - 1)]
    transfer_weights(here, weights_of(there, class_names=names), [names[number] for number in order])
    for ours, theirs in ((here.head, there.head), (here.head_dist, there.head_dist)):
        torch.testing.assert_close(ours(torch.ones(2, 384)), theirs(torch.ones(2, 384))[:, order])
        assert torch.equal(ours.bn.weight, theirs.bn.weight)


@pytest.mark.parametrize(
    ("theirs", "ours", "classes", "kept"),
    [
        (["ant", "bee", "cow"], ["ant", "bee", "dog"], 3, False),
        (["ant", "bee", "cow"], ["ant", "bee", "cow"], 3, True),
        (None, ["ant", "bee", "cow"], 3, True),
        (None, ["ant", "bee"], 2, False),
    ],
)
def test_the_classifier_of_other_classes_is_not_taken(theirs, ours, classes, kept):
    there, here = make(), make(classes=classes, seed=1)
    own = here.head.weight.clone()
    report = transfer_weights(here, weights_of(there, class_names=theirs), ours)
    images = pictures(2, 3, *SIZE)
    torch.testing.assert_close(here.forward_features(images), there.forward_features(images))
    assert torch.equal(here.head.weight, there.head.weight if kept else own)
    assert report.new == ([] if kept else ["head.weight", "head.bias"])
    assert not report.reordered


class Headless(torch.nn.Module):
    """A model of a user without `get_classifier`, by which timm's models name their last layer."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 3)


def test_the_last_layer_of_a_model_that_does_not_name_it_is_not_taken_for_other_classes():
    there, here = Headless(), Headless()
    weights = Weights("there", there.state_dict(), class_names=["ant", "bee", "cow"])
    for names in (["cow", "ant", "bee"], ["ant", "bee", "dog"]):
        with pytest.raises(ValueError, match=r"Headless has no get_classifier\(\).* classes 'ant', 'bee', 'cow'"):
            transfer_weights(here, weights, names)
    for names in (["ant", "bee", "cow"], None):
        assert transfer_weights(here, weights, names).new == []


@needs_timm("1.0.31")
def test_timm_models_are_adapted_as_timm_does_it():
    there = make("vit_tiny_patch16_224", classes=5)
    here = make("vit_tiny_patch16_224", size=(32, 16), patch_size=8, seed=1)
    cfg = {"state_dict": there.state_dict(), "num_classes": 5, "input_size": (3, *SIZE)}
    arguments = {"img_size": (32, 16), "num_classes": 3, "pretrained_cfg_overlay": cfg}
    expected = timm.create_model("vit_tiny_patch16_224", pretrained=True, **arguments, **KWARGS | {"patch_size": 8})
    report = transfer_weights(here, weights_of(there, input_size=(3, *SIZE)))
    for name, tensor in expected.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(here.state_dict()[name], tensor), name
    assert report.resized == ["pos_embed", "patch_embed.proj.weight"]
    assert report.new == ["head.weight", "head.bias"]
    assert here.pretrained_cfg["input_size"] == (3, 224, 224)


def test_the_grid_of_an_absolute_embedding_is_that_of_the_images_it_was_trained_on():
    # 2 x 8 patches are as many as 4 x 4, so the number of entries alone does not tell the grid.
    there, here = (make(size=size, pos_embed="learn") for size in ((8, 32), (16, 40)))
    transfer_weights(here, weights_of(there, input_size=(3, 8, 32)))
    expected = resample_abs_pos_embed(there.pos_embed, (4, 10), (2, 8), num_prefix_tokens=0)
    torch.testing.assert_close(here.pos_embed, expected)


def test_plain_weights_into_a_retrofitted_model_compute_the_same():
    there = make("vit_tiny_patch16_224")
    here = make("vit_tiny_patch16_224", seed=1, retrofit={"rel_terms": "kvb", "max_distance": (2, 3)})
    for name, parameter in here.named_parameters():
        if ".position." in name:
            torch.nn.init.zeros_(parameter)
    report = transfer_weights(here, weights_of(there))
    images = pictures(2, 3, *SIZE)
    torch.testing.assert_close(here(images), there(images))
    assert report.skipped == []
    tables = ["key_rows", "key_cols", "value_rows", "value_cols", "bias_rows", "bias_cols"]
    assert report.plain()["new"] == [f"blocks.*.attn.position.{table} (2)" for table in tables]


def test_a_retrofitted_model_into_one_with_another_clip_distance():
    there = make("vit_tiny_patch16_224", retrofit={"max_distance": 2})
    here = make("vit_tiny_patch16_224", seed=1, retrofit={"max_distance": (4, 9)})
    report = transfer_weights(here, weights_of(there))
    images = pictures(2, 3, *SIZE)
    torch.testing.assert_close(here(images), there(images))
    assert len(report.loaded) == len(here.state_dict())
    tables = ["key_rows", "key_cols", "value_rows", "value_cols"]
    assert report.plain()["resized"] == [f"blocks.*.attn.position.{table} (2)" for table in tables]


def test_an_absolute_embedding_that_retrofit_dropped_is_not_missed():
    there = make("vit_tiny_patch16_224")
    here = make("vit_tiny_patch16_224", seed=1, retrofit={"abs_pos": "drop"})
    report = transfer_weights(here, weights_of(there))
    expected = retrofit(there, abs_pos="drop")
    images = pictures(2, 3, *SIZE)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if ".position." in name:
                parameter.copy_(here.get_parameter(name))
    torch.testing.assert_close(here(images), expected(images))
    assert report.skipped == ["pos_embed"]


def test_plain_weights_into_a_relvit_model():
    there, here = make("vit_tiny_patch16_224"), make("relvit_tiny", seed=1, **PLAIN)
    report = transfer_weights(here, weights_of(there))
    images = pictures(2, 3, *SIZE)
    torch.testing.assert_close(here(images), there(images))
    # The filter adds tables of zeros, which count as new.
    assert {name.rpartition("_")[0] for name in report.new} == {
        f"blocks.{i}.attn.position.{term}" for i in (0, 1) for term in ("key", "value")
    }


def test_input_channels_are_adapted_as_timm_does_it():
    there, here = make(), make(chans=1, seed=1)
    report = transfer_weights(here, weights_of(there))
    image = pictures(2, 1, *SIZE)
    torch.testing.assert_close(here(image), there(image.expand(-1, 3, -1, -1)))
    assert report.resized == ["patch_embed.proj.weight"]


def test_blocks_that_only_one_of_them_has():
    there, here = make(depth=3), make(seed=1, depth=2)
    assert {name.split(".")[1] for name in transfer_weights(here, weights_of(there)).skipped} == {"2"}
    report = transfer_weights(make(seed=1, depth=4), weights_of(there))
    assert {name.split(".")[1] for name in report.new} == {"3"}
    assert "new: blocks.*.norm1.weight" in str(report)


def test_another_width_or_nothing_in_common_is_refused():
    here = make()
    own = {name: tensor.clone() for name, tensor in here.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"there does not fit this RelVisionTransformer: another shape in \d+ of \d+ tensors"
    ):
        transfer_weights(here, weights_of(make(embed_dim=32)))
    with pytest.raises(ValueError, match=r"nothing in there fits this RelVisionTransformer: it holds .conv1.0.weight."):
        transfer_weights(here, weights_of(timm.create_model("test_resnet")))
    with pytest.raises(ValueError, match=r"it holds none, the model .*; if only a prefix of the names differs"):
        transfer_weights(here, Weights("there", {}))
    torch.testing.assert_close(dict(here.state_dict()), own, rtol=0, atol=0)


def test_what_is_left_out_is_in_the_report_alone(caplog):
    there = timm.create_model("deit_tiny_distilled_patch16_224", img_size=SIZE, num_classes=3, **KWARGS)
    report = transfer_weights(make("relvit_tiny"), weights_of(there, input_size=(3, *SIZE)))
    assert sorted(report.skipped) == ["cls_token", "dist_token", "head_dist.bias", "head_dist.weight", "pos_embed"]
    assert "left out" not in caplog.text
