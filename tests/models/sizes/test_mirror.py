"""The reach 'mirror' compared with timm's models whose embedding NumPy has padded, also from another trained size."""

import copy

import numpy as np
import pytest
import torch
from retrofit_cases import build, fingerprint, images, retrofitted
from timm_versions import since
from vits import small

import relvit
from relvit.models import set_reach

# Models are for images of 24 x 16 pixels in patches of 8: 3 x 2 patches.
TRAINED = (3, 2)
SIZES = [(64, 48), (40, 16), (8, 72)]
# These models have a class token, registers outside of the embedding, two class tokens, no prefix token, and a rotary
# embedding.
VITS = ["clip", "dinov2", "deit distilled", "siglip", "eva02"]


def padded(pos_embed, grid, trained=TRAINED):
    """Mirror the embedding at the edges of the trained grid, or cut out its centre for a smaller grid."""
    embedding = pos_embed.detach()
    prefix = embedding.shape[1] - trained[0] * trained[1]
    patches = embedding[0, prefix:].unflatten(0, trained).numpy()
    for axis, (old, new) in enumerate(zip(trained, grid, strict=True)):
        before = (new - old) // 2
        if new > old:
            widths = [(0, 0)] * 3
            widths[axis] = (before, new - old - before)
            patches = np.pad(patches, widths, "symmetric")
        else:
            patches = patches.take(range(-before, new - before), axis)
    return torch.cat((embedding[:, :prefix], torch.from_numpy(patches).flatten(0, 1)[None]), dim=1)


def with_embedding(model, pos_embed, grid):
    """Return a copy of the model as if it were built for this grid."""
    model = copy.deepcopy(set_reach(model, "trained"))
    model.pos_embed, model.patch_embed.grid_size = torch.nn.Parameter(pos_embed), grid
    return model


@pytest.mark.parametrize("case", VITS)
def test_untrained_it_is_timms_model_for_that_size(case):
    original = build(case)
    model = retrofitted(original, trained=False)
    for size in SIZES:
        grid = (size[0] // 8, size[1] // 8)
        expected = build(case, img_size=size)
        expected.load_state_dict(original.state_dict() | {"pos_embed": padded(original.pos_embed, grid)})
        tokens = expected.forward_features(images(*size))
        # timm computes rotary embeddings in single precision.
        got = set_reach(model, "mirror").forward_features(images(*size))
        torch.testing.assert_close(got, tokens, rtol=0, atol=1e-8)
        assert (set_reach(model, "trained").forward_features(images(*size)) - tokens).abs().max() > 1e-2


MODELS = {
    "relvit": lambda: small(pos_embed="learn", class_token=True, reg_tokens=1).double().eval(),
    "relvit, tokens apart": lambda: small(pos_embed="learn", class_token=True, no_embed_class=True).double().eval(),
    "beit": lambda: relvit.retrofit(build("beit both")),
    **{case: lambda case=case: retrofitted(build(case)) for case in VITS},
}


@pytest.mark.parametrize("name", MODELS)
def test_tables_as_they_were_and_stretched(name):
    model = MODELS[name]()
    for tables, reach in (("trained", "mirror"), ("stretch", "stretch-mirror")):
        for size in SIZES[1:]:
            grid = (size[0] // 8, size[1] // 8)
            plain = with_embedding(model, padded(model.pos_embed, grid), grid)
            expected = set_reach(plain, tables, (24, 16))(images(*size))
            torch.testing.assert_close(set_reach(model, reach)(images(*size)), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_the_trained_size_stays_bit_by_bit(name):
    for trained, dtype in (((24, 16), torch.bfloat16), ((40, 32), torch.float32)):
        model, x = MODELS[name]().to(dtype), images(*trained).to(dtype)
        expected = model(x)
        assert torch.equal(set_reach(model, "mirror", trained)(x), expected)
        assert torch.equal(set_reach(model, "trained")(x), expected)


@pytest.mark.parametrize("name", MODELS)
def test_another_trained_size_is_interpolated_to_and_mirrored_from_there(name):
    if name == "beit":
        since("1.0.31")
    model = MODELS[name]()
    resized = copy.deepcopy(model)
    resized.set_input_size((40, 32))
    if name == "beit":
        # `set_input_size` of timm also resizes BEiT's tables, but a reach does not change tables, so put the old tables
        # back.
        for block, other in zip(resized.blocks, model.blocks, strict=True):
            block.attn.position = other.attn.position
    expected = set_reach(resized, "mirror")(images(64, 48))
    # `set_input_size` interpolates in single precision.
    torch.testing.assert_close(set_reach(model, "mirror", (40, 32))(images(64, 48)), expected, rtol=0, atol=1e-5)
    assert (set_reach(model, "mirror")(images(64, 48)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trained", [None, (16, 32)])
def test_the_size_of_the_model_may_be_set_before_or_after_it(name, trained):
    if name == "beit":
        since("1.0.31")
    before, after = MODELS[name](), set_reach(MODELS[name](), "mirror", trained)
    for model in (before, after):
        model.set_input_size((40, 32))
    expected = set_reach(before, "mirror", trained)(images(64, 48))
    torch.testing.assert_close(after(images(64, 48)), expected, rtol=0, atol=1e-12)


def test_tables_that_a_later_size_of_the_model_does_not_interpolate_are_stretched_from_their_own():
    before, after = MODELS["relvit"](), set_reach(MODELS["relvit"](), "stretch-mirror")
    for model in (before, after):
        model.set_input_size((40, 32))
    x, plain = images(40, 32), before(images(40, 32))
    assert torch.equal(set_reach(before, "stretch-mirror")(x), plain)
    expected = set_reach(before, "stretch", (24, 16))(x)
    torch.testing.assert_close(after(x), expected, rtol=0, atol=1e-12)
    assert (expected - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["relvit", "eva02", "beit"])
def test_every_copy_of_a_vector_adds_to_its_gradient(name):
    if name == "eva02":
        # Older versions of timm interpolate in single precision.
        since("1.0.31")
    model, grid = MODELS[name](), (5, 6)
    larger = with_embedding(model, padded(model.pos_embed, grid), grid)
    larger(images(40, 48)).square().sum().backward()
    entries = torch.arange(model.pos_embed.shape[1])[None, :, None]
    expected = torch.zeros_like(model.pos_embed).index_add(1, padded(entries, grid).flatten(), larger.pos_embed.grad)
    set_reach(model, "mirror")(images(40, 48)).square().sum().backward()
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(model.pos_embed.grad, expected, rtol=1e-9, atol=1e-9)


def test_a_model_that_is_restored_forgets_it():
    original = build("beit", use_abs_pos_emb=True)
    model = set_reach(relvit.retrofit(copy.deepcopy(original)), "mirror")
    assert model.mirrored_grid == TRAINED
    assert fingerprint(relvit.restore(model)) == fingerprint(original)
    assert torch.equal(model(images()), original(images()))
