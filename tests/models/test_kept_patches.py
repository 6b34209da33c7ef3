"""`forward_features(keep=)`: the features of some patches are the same as with a mask that hides all other patches."""

import copy

import pytest
import torch
from own_positions import mvit
from retrofit_cases import build, retrofitted
from timm.layers import PatchDropoutWithIndices
from vits import FAMILIES, images, small

import relvit

RELVIT = {
    "class token": {"class_token": True, "reg_tokens": 2, "prefix_bias": True, "pos_embed": "learn"},
    "axial": {"pos_embed": "axial", "reg_tokens": 1, "rel_terms": "qkvb", "max_distance": (1, 2)},
    "xl": {"position": "xl"},
    "low-rank": {"position": "low-rank"},
    "of tokens": {"position": "pape"},
    "rotary": {"embed_dim": 16, "rope": "mixed", "rel_terms": "k", "class_token": True},
    "joint": {"layout": "joint", "rel_terms": "kv"},
    "reversible": {"reversible": True},
}
RETROFITTED = ("dinov2", "deit distilled", "siglip", "relpos mlp", "srelpos", "beit both")
# The image has 4 x 3 patches. Each of two images keeps five patches, in any order.
KEEP = torch.tensor([[7, 0, 3, 11, 4], [1, 10, 2, 6, 9]])


def key_mask(prefix, patches):
    """Return a mask (B, 1, 1, N), True for prefix tokens and the kept patches."""
    mask = torch.zeros(len(KEEP), 1, 1, prefix + patches, dtype=torch.bool)
    mask[..., :prefix] = True
    return mask.scatter_(3, prefix + KEEP[:, None, None], True)


@pytest.mark.parametrize("case", [*RELVIT, *RETROFITTED])
def test_a_masked_encoder_is_the_whole_one_under_a_mask_of_keys(case):
    model = small(**RELVIT[case]).double().eval() if case in RELVIT else retrofitted(build(case))
    whole, x = copy.deepcopy(model), images(32, 24, dtype=torch.float64)
    prefix = model.num_prefix_tokens
    tokens = model.forward_features(x, keep=KEEP)
    expected = whole.forward_features(x, attn_mask=key_mask(prefix, 12))
    places = torch.cat((torch.arange(prefix).expand(2, -1), prefix + KEEP), dim=1)
    expected = expected.gather(1, places[..., None].expand_as(tokens))
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-10)

    tokens.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max()) + 1
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-9 * scale, msg=name)


@pytest.mark.parametrize("name", ["test_relvit", *FAMILIES])
def test_it_is_what_patch_dropout_drops(name):
    model = small(name, patch_drop_rate=0.5, class_token=True, pos_embed="axial").double()
    kept = []
    model.patch_drop.register_forward_hook(lambda module, given, output: kept.append(output[1]))
    torch.manual_seed(0)
    expected = model.train().forward_features(images(32, 24, dtype=torch.float64))
    assert isinstance(model.patch_drop, PatchDropoutWithIndices)
    found = model.eval().forward_features(images(32, 24, dtype=torch.float64), keep=kept[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_all_patches_in_their_order_are_the_whole_image():
    model = small(class_token=True).eval()
    whole = model.forward_features(images())
    torch.testing.assert_close(model.forward_features(images(), keep=torch.arange(6).expand(2, -1)), whole)


@pytest.mark.parametrize("case", ["eva", "naflex", "sam", "swin", "swinv2", "mvit"])
def test_models_that_encode_all_patches_say_so(case):
    original = mvit("patches") if case == "mvit" else build(case)
    with pytest.raises(
        ValueError, match=r"keep is for models of relvit .* Beit after retrofit; Retrofitted\w+ encodes"
    ):
        relvit.retrofit(original).forward_features(images(), keep=KEEP)


def test_what_cannot_be_kept():
    model = small()
    with pytest.raises(TypeError, match="keep must hold integers"):
        model.forward_features(images(), keep=torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"keep must have shape \(B, K\) with B = 2 and K > 0, got \(6,\)"):
        model.forward_features(images(), keep=torch.arange(6))
    # Without patches, average pooling would yield NaN.
    with pytest.raises(ValueError, match=r"keep must have shape \(B, K\) with B = 2 and K > 0, got \(2, 0\)"):
        model.forward_features(images(), keep=torch.empty(2, 0, dtype=torch.int64))
    relvit.models.set_reach(model, "bands")
    with pytest.raises(ValueError, match="computes in parts"):
        model.forward_features(images(), keep=torch.arange(6).expand(2, -1))
