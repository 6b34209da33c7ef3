"""Biases of prefix tokens against timm's BEiT bias, and in models, float64."""

import pytest
import torch
from position_cases import DIM, HEADS, draw, layer, plain, run
from timm.models.beit import Attention as BeitAttention
from vits import images, small

from relvit.layers import PrefixBias, RelativeAttention, RelativePosition2d
from relvit.layers.timm_attention import TimmRelativePlain
from relvit.ops import make_grid


@pytest.mark.parametrize("backend", ["reference", "gathered", "auto"])
def test_is_beits(backend):
    torch.manual_seed(0)
    theirs = BeitAttention(DIM, HEADS, qkv_bias=True, window_size=(3, 4)).double().eval()
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    position = RelativePosition2d(DIM // HEADS, HEADS, "b", max_distance=(2, 3), layout="joint")
    attn = RelativeAttention(DIM, HEADS, position=position, qkv_bias=True, backend=backend).double()
    attn.prefix_bias = PrefixBias(HEADS).double()
    attn.qkv.weight.data, attn.proj.weight.data = theirs.qkv.weight.data, theirs.proj.weight.data
    attn.proj.bias.data = theirs.proj.bias.data
    attn.qkv.bias.data = torch.cat((theirs.q_bias, theirs.k_bias, theirs.v_bias)).data
    table = theirs.relative_position_bias_table.data
    # timm's offsets are query minus key.
    position.bias_table.data = table[:-3].T.unflatten(1, (5, 7)).flip(1, 2)
    attn.prefix_bias.weight.data = table[-3:]
    x = torch.randn(2, 13, DIM, dtype=torch.float64)
    torch.testing.assert_close(attn(x, make_grid(3, 4, prefix=1)), theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cls", [RelativeAttention, TimmRelativePlain])
def test_several_prefix_tokens_with_gradients(cls):
    """One bias for all prefix tokens, besides the terms of tables, in relvit's attention and retrofitted ones."""
    attn = layer(RelativePosition2d(DIM // HEADS, HEADS, ""), cls)
    without = plain(attn)
    attn.prefix_bias = PrefixBias(HEADS).double()
    grid, x = make_grid(2, 3, prefix=2), draw(2, 8, DIM)
    torch.testing.assert_close(run(attn, x, grid), without(x), rtol=0, atol=1e-12)
    weight = torch.nn.init.normal_(attn.prefix_bias.weight)
    # From and to prefix tokens: the numbers of both, of one alone, and none between patches.
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
