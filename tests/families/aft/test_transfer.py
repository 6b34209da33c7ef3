"""Weights for attention-free models: from attention, from attention-free models at other sizes, and refused weights."""

from typing import NamedTuple

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from transfers import SIZE, pictures
from transfers import make as make_any

from relvit.models.weights.transfer import Weights, transfer_weights

CONV = {"mixer": "conv", "kernel_size": (3, 5)}
PROJECTIONS = ["blocks.*.attn.qkv.weight (2)", "blocks.*.attn.qkv.bias (2)"]


def make(name="test_relvit_aft", **kwargs):
    return make_any(name, **{"patch_size": 8, "embed_dim": 12, "num_heads": 1, "mlp_ratio": 4, **kwargs})


def deit(**kwargs):
    return make("deit_small_patch16_224", num_heads=3, seed=7, **kwargs)


def weights_of(net, size=SIZE):
    return Weights("there", net.state_dict(), input_size=(3, *size))


ABSENT = {"cls_token", "pos_embed", "norm.weight", "norm.bias"}


class Case(NamedTuple):
    mixer: dict
    filters: list
    absent: set


CASES = {
    "conv": Case({**CONV, "num_heads": 2}, ["kernel", "gamma", "beta"], ABSENT),
    # With one head per channel `qkv` has the shape of attention's `qkv`, but only the values must be transferred.
    "conv-heads": Case({**CONV, "num_heads": 12}, ["kernel", "gamma", "beta"], ABSENT),
    "full": Case({"mixer": "full", "bias_dim": 5}, ["u", "v"], set()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_of_deit_but_positions_class_token_queries_and_keys(case):
    there, here = deit(), make(**case.mixer)
    before = {name: tensor.clone() for name, tensor in here.state_dict().items()}
    transfer_weights(here, weights_of(there))
    given, found = there.state_dict(), here.state_dict()
    for name, tensor in found.items():
        if ".attn.qkv." in name:
            assert torch.equal(tensor[-12:], given[name][24:])
            assert torch.equal(tensor[:-12], before[name][:-12])
        elif name.rpartition(".")[2] in case.filters:
            assert torch.equal(tensor, before[name])
        else:
            # With average pooling the last norm has the name `fc_norm`.
            assert torch.equal(tensor, given[name.replace("fc_norm", "norm")]), name
    assert given.keys() - found.keys() == case.absent


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_report_says_what_is_taken_in_part_what_is_new_and_what_is_skipped(case):
    here = make(**case.mixer)
    report = transfer_weights(here, weights_of(deit())).plain()
    assert report == {
        "source": "there",
        "reordered": False,
        "loaded": len(here.state_dict()) - 2 * len(case.filters),
        "in_part": [f"the values of {name}" for name in PROJECTIONS],
        "new": [f"blocks.*.attn.{name} (2)" for name in case.filters],
        "skipped": sorted(name for name in case.absent if "norm" not in name),
        "resized": [],
    }


def test_simple_takes_all_of_attention_since_its_own_tensors_look_the_same():
    there, here = make(mixer="simple"), make(mixer="simple", seed=1)
    report = transfer_weights(here, weights_of(there))
    torch.testing.assert_close(here(pictures(2, 3, *SIZE)), there(pictures(2, 3, *SIZE)))
    assert len(report.loaded) == len(here.state_dict())
    here = make(mixer="simple", seed=1)
    assert transfer_weights(here, weights_of(deit())).in_part == {}
    assert torch.equal(here.blocks[1].attn.qkv.weight, deit().blocks[1].attn.qkv.weight)


@pytest.mark.parametrize(("mixer", "patch_size"), [({"mixer": "full"}, 8), ({"mixer": "local", "window": 2}, 4)])
def test_biases_of_another_grid_are_interpolated(mixer, patch_size):
    """Biases are interpolated from 4 x 6 to 5 x 3 patches, also if only the size of patches differs."""
    old, new = (4 * patch_size, 6 * patch_size), (40, 24)
    there, here = make(**mixer, size=old, patch_size=patch_size), make(**mixer, size=new, seed=1)
    report = transfer_weights(here, weights_of(there, old))
    for block, source in zip(here.blocks, there.blocks, strict=True):
        for name in ("u", "v"):
            factor = getattr(source.attn, name).detach()
            expected = resample_abs_pos_embed(factor[None], (5, 3), (4, 6), num_prefix_tokens=1)[0]
            torch.testing.assert_close(getattr(block.attn, name).detach(), expected)
        assert torch.equal(block.attn.qkv.weight, source.attn.qkv.weight)
    resized = {"pos_embed", "blocks.*.attn.u (2)", "blocks.*.attn.v (2)"}
    assert set(report.plain()["resized"]) == resized | ({"patch_embed.proj.weight"} if patch_size == 4 else set())
    assert (report.in_part, report.new, report.skipped) == ({}, [], [])
    if patch_size == 8:
        # The model itself interpolates its biases for images of another size in the same way.
        torch.testing.assert_close(here(pictures(2, 3, *new)), there(pictures(2, 3, *new)), rtol=1e-4, atol=1e-5)


def test_a_grid_of_the_models_own_size_is_the_models_own():
    """2 x 8 patches are as many as 4 x 4, and plain weights do not say which grid they are for."""
    options = {"mixer": "full", "size": (16, 64), "class_token": False, "pos_embed": ""}
    there, here = make(**options), make(**options, seed=1)
    transfer_weights(here, Weights("there", there.state_dict()))
    torch.testing.assert_close(here(pictures(2, 3, 16, 64)), there(pictures(2, 3, 16, 64)))


@pytest.mark.parametrize(
    ("theirs", "ours", "what"),
    [
        ({**CONV, "num_heads": 2}, {**CONV, "num_heads": 2, "kernel_size": 5}, r"attn.kernel \(2, 3, 5\), here \(2, 5"),
        ({**CONV, "num_heads": 2}, {**CONV, "num_heads": 3}, r"blocks.0.attn.kernel \(2, 3, 5\), here \(3, 3, 5\)"),
        ({"mixer": "full"}, {"mixer": "full", "bias_dim": 5}, r"blocks.0.attn.u \(7, 128\), here \(7, 5\)"),
        ({"mixer": "full"}, {"mixer": "full", "reg_tokens": 1}, r"attn.u \(7, 128\), here \(8, 128\)"),
        ({"mixer": "full"}, {"mixer": "full", "class_token": False}, r"attn.u \(7, 128\), here \(6, 128\)"),
        (None, {**CONV, "num_heads": 2, "embed_dim": 24}, r"patch_embed.proj.weight \(12, 3, 8, 8\), here \(24"),
    ],
    ids=["kernel_size", "num_heads", "bias_dim", "reg_tokens", "class_token", "embed_dim"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(theirs, ours, what):
    there = deit() if theirs is None else make(**theirs)
    here = make(**ours, seed=1)
    before = {name: tensor.clone() for name, tensor in here.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"there does not fit this AFTVisionTransformer: .*{what}.* build the model that the weights"
    ):
        transfer_weights(here, weights_of(there))
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.state_dict().items())


@pytest.mark.parametrize("name", ["test_relvit", "deit_tiny_patch16_224"])
def test_attention_does_not_take_queries_and_keys_that_are_none(name):
    attention = make_any(name, embed_dim=64, depth=6)
    own = {key: tensor.clone() for key, tensor in attention.state_dict().items()}
    message = f"queries and keys have no meaning in this {type(attention).__name__}: build the model that the weights"
    with pytest.raises(ValueError, match=message):
        transfer_weights(attention, weights_of(make_any("test_relvit_aft", embed_dim=64, depth=6, num_heads=64)))
    assert all(torch.equal(tensor, own[key]) for key, tensor in attention.state_dict().items())
