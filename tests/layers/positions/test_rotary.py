"""Rotary embedding of relvit's models: angles compared with timm's layers, outputs with brute force; float64."""

import pytest
import torch
from draws import all_places
from oracles import relative_attention as oracle
from position_cases import HEADS, LAYOUTS, draw, layer
from retrofit_cases import build, images, retrofitted
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingMixed
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from vits import small

from relvit.layers import RelativePosition2d, RotaryEmbedding2d
from relvit.ops import make_grid, num_tokens

DIM = 16


def timms(rope, height, width):
    """Compute sines and cosines by timm's layer with the same frequencies, (1 or heads, H W, 2 head_dim)."""
    if rope.kind == "axial":
        theirs = RotaryEmbeddingCat(DIM // HEADS, temperature=100.0, in_pixels=False)
        return theirs.get_embed((height, width))[None].double()
    theirs = RotaryEmbeddingMixed(DIM, 1, HEADS)
    theirs.freqs.data = rope.frequencies.data.flip(0)[:, None].float()
    return theirs.get_embed((height, width))[0].detach().double()


@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_rotates_as_timm(kind):
    torch.manual_seed(0)
    rope = RotaryEmbedding2d(DIM // HEADS, HEADS, kind)
    x = draw(2, HEADS, 2 + 15, DIM // HEADS)
    expected = torch.cat((x[:, :, :2], apply_rot_embed_cat(x[:, :, 2:], timms(rope, 3, 5))), dim=2)
    torch.testing.assert_close(rope(x, make_grid(3, 5, prefix=2)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "rel_terms"), [("axial", ""), ("mixed", "qkvb")])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layer_with_tables_equals_brute_force(name, kind, rel_terms):
    grid = LAYOUTS[name]
    position = RelativePosition2d(DIM // HEADS, HEADS, rel_terms, max_distance=2)
    attn = layer(position, dim=DIM)
    attn.rope = rope = RotaryEmbedding2d(DIM // HEADS, HEADS, kind).double()
    x = draw(2, num_tokens(grid), DIM)
    got = attn(x, grid)
    q, k, v = attn.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).permute(2, 0, 3, 1, 4)
    places = all_places(grid, 2)
    coords = torch.tensor([[spot for spot in spots if spot is not None] for spots in places]).double()
    angles = (
        coords[:, None, :, :1] * rope.frequencies[0][:, None] + coords[:, None, :, 1:] * rope.frequencies[1][:, None]
    )
    angles = angles.repeat_interleave(2, dim=-1)
    sines_cosines = torch.cat((angles.sin(), angles.cos()), dim=-1)
    rotated = [oracle.rotate(part, sines_cosines, grid.prefix, half=False) for part in (q, k)]
    expected = oracle.attention(*rotated, v, position(grid), places, position_query=q, position_key=k)
    expected = attn.proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    if kind == "mixed":
        grads = [torch.autograd.grad(out.sin().sum(), rope.frequencies)[0] for out in (got, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_frequencies_of_models_and_in_half_precision():
    model = small("test_relvit", rope="mixed", embed_dim=16)
    assert "blocks.1.attn.rope.frequencies" in model.no_weight_decay()
    drawn = [block.attn.rope for block in model.blocks]
    for block in drawn:
        block.init_weights()
    assert not torch.equal(drawn[0].frequencies, drawn[1].frequencies)
    torch.testing.assert_close(drawn[0].frequencies.norm(dim=0)[0], torch.tensor([1, 10**-0.5] * 2))
    x, grid = draw(1, 2, 40, 8), make_grid(1, 40)
    got = RotaryEmbedding2d(8, 2).bfloat16()(x.bfloat16(), grid)
    assert got.dtype == torch.bfloat16
    expected = RotaryEmbedding2d(8, 2)(x, grid)
    # The frequencies stay in float32, and only the tokens are rounded.
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.05)


def test_halting_tokens_are_rotated_as_all():
    model = small("test_relvit_universal", rope="mixed", embed_dim=16, halting="act", depth=4).eval()
    x = torch.randn(2, 3, 24, 40, generator=torch.Generator().manual_seed(1))
    got = model(x)
    model.gather = False
    torch.testing.assert_close(got, model(x), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_traces_of_timms_embedding_serve_other_sizes():
    model = retrofitted(build("rope axial"))
    traced = torch.jit.trace(model, images(), check_trace=False)
    for x in (images(), images(40, 32)):
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=1e-7)


def test_models_refuse():
    with pytest.raises(ValueError, match="rope is 'mix'; allowed are '', 'axial', 'mixed'"):
        small(rope="mix")
    with pytest.raises(ValueError, match=r"prefix_bias=True needs .* set class_token=True or reg_tokens"):
        small(prefix_bias=True)
    with pytest.raises(ValueError, match=r"rope and prefix_bias are for RelativeAttention, not for LSH.*: leave them"):
        small("test_relvit_lsh", rope="axial", embed_dim=16)
