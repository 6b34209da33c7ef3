"""`relvit.restore`: the original's classes, attributes and tensors, bit by bit where nothing was trained."""

import copy
import pickle

import pytest
import torch
from retrofit_cases import OWN, build, fingerprint, images, with_exact_offsets
from sam_cases import ELSEWHERE, sam_encoder, sam_model

import relvit
from relvit.models import set_reach

CASES = [case for case in (*OWN, *ELSEWHERE) if case != "beit both"]


def original_and_images(case):
    if case in ELSEWHERE:
        return sam_encoder(case), images(56, 56)
    return build(case), images(*OWN[case][1]["img_size"])


def features(model, x):
    output = model(x)
    return output if isinstance(output, torch.Tensor) else output[0]


def all_tensors(model):
    """Parameters and buffers, those included that the state dict leaves out."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("case", CASES)
def test_everything_is_the_originals(case):
    original, x = original_and_images(case)
    model = copy.deepcopy(relvit.retrofit(copy.deepcopy(original)))
    features(model, x)
    if case not in ("swin", "swinv2"):
        set_reach(model, "logn")
    assert with_exact_offsets(relvit.restore(model)) is model
    assert fingerprint(model) == fingerprint(original)
    ours, theirs = all_tensors(model), all_tensors(original)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert (ours[name].dtype, ours[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
    assert torch.equal(features(model, x), features(original, x))
    # Twice is once.
    relvit.restore(relvit.retrofit(model))
    assert fingerprint(model) == fingerprint(original)


@pytest.mark.parametrize("case", CASES)
def test_tables_that_were_trained_compute_the_same(case):
    original, x = original_and_images(case)
    model = relvit.retrofit(original)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    expected = features(model, x)
    error = (features(with_exact_offsets(relvit.restore(model)), x) - expected).abs().max()
    assert error <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("case", ["swinv2", "srelpos", "sam_hq"])
def test_after_half_and_pickles(case):
    original, _ = original_and_images(case)
    model = pickle.loads(pickle.dumps(relvit.retrofit(copy.deepcopy(original)).half().train()))
    relvit.restore(model)
    assert model.training
    assert all(part.training for part in model.modules())
    for name, tensor in original.half().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_blocks_that_were_pruned_stay_away():
    model = relvit.retrofit(build("sam"))
    model.prune_intermediate_layers([0])
    relvit.restore(model)
    assert len(model.blocks) == 1
    assert type(model.blocks[0].attn).__module__.startswith("timm.")


def whole_sam():
    model = sam_model()
    relvit.retrofit(model.vision_encoder)
    return model


REFUSED = {
    "not retrofitted": (lambda: build("sam"), "VisionTransformerSAM has not been retrofitted$"),
    "a part is": (whole_sam, r"its vision_encoder has: relvit\.restore\(model\.vision_encoder\)"),
    "added tables": (lambda: relvit.retrofit(build("dinov2")), "no place for the tables that retrofit added"),
    "dropped": (
        lambda: relvit.retrofit(build("sam absolute"), abs_pos="drop"),
        "cannot be restored: abs_pos='drop' has removed pos_embed",
    ),
    "sums": (
        lambda: relvit.retrofit(build("beit both")),
        r"blocks\.0\.attn\.relative_position_bias_table was added to the tables of blocks\.0\.attn",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_as_it_is(name):
    make, message = REFUSED[name]
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.restore(model)
    assert fingerprint(model) == before
