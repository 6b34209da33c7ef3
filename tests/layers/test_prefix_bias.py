"""Biases of prefix tokens, pair by pair, and in models, in float64; tests of the retrofit have BEiT's own bias."""

import pytest
import torch
from position_cases import DIM, HEADS, draw, layer, plain, run
from vits import images, small

from relvit.layers import PrefixBias, RelativeAttention, RelativePosition2d
from relvit.models.retrofit.timm_attention import TimmRelativePlain
from relvit.ops import make_grid


@pytest.mark.parametrize("cls", [RelativeAttention, TimmRelativePlain])
def test_several_prefix_tokens_with_gradients(cls):
    """All prefix tokens share one bias, in relvit's attention and in retrofitted attention."""
    attn = layer(RelativePosition2d(DIM // HEADS, HEADS, ""), cls)
    without = plain(attn)
    attn.prefix_bias = PrefixBias(HEADS).double()
    grid, x = make_grid(2, 3, prefix=2), draw(2, 8, DIM)
    torch.testing.assert_close(run(attn, x, grid), without(x), rtol=0, atol=1e-12)
    weight = torch.nn.init.normal_(attn.prefix_bias.weight)
    # Pairs of two prefix tokens have one bias, pairs with one prefix token another, and pairs of patches none.
    to_patch, to_prefix, between = weight
    rows = [[between, to_patch], [to_prefix, 0 * between]]
    bias = torch.stack([torch.stack([rows[i >= 2][j >= 2] for j in range(8)]) for i in range(8)]).movedim(-1, 0)
    got, expected = run(attn, x, grid), without(x, attn_mask=bias[None])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    grads = [torch.autograd.grad(out.sin().sum(), weight)[0] for out in (got, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_models_have_it_where_asked_for():
    model = small(class_token=True, prefix_bias=True, position="slopes")
    assert "blocks.0.attn.prefix_bias.weight" in model.no_weight_decay()
    model(images()).sum().backward()
    assert all(block.attn.prefix_bias.weight.grad.any() for block in model.blocks[:-1])
    assert small(class_token=True).blocks[0].attn.prefix_bias is None
