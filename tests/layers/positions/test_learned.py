"""What all positions that are learned have in common."""

from functools import partial

import pytest
import torch
from position_cases import DIM, HEADS, draw, layer, plain

from relvit.families.transformer_xl import TransformerXLPosition2d
from relvit.layers import (
    AxialPositionEmbedding,
    ContinuousPosition2d,
    FirePosition2d,
    LowRankPosition2d,
    ParabolicPosition2d,
    RelativePosition2d,
    RotaryEmbedding2d,
)
from relvit.ops import make_grid, num_tokens

LEARNED = {
    "tables": partial(RelativePosition2d, rel_terms="qkvb", max_distance=2),
    "xl": TransformerXLPosition2d,
    "fire": partial(FirePosition2d, threshold=1.0),
    "cpb": ContinuousPosition2d,
    "cpb, swin": partial(ContinuousPosition2d, mode="swin", window=(4, 3)),
    "pape": ParabolicPosition2d,
    "low-rank": LowRankPosition2d,
}


@pytest.mark.parametrize("name", [name for name in LEARNED if name != "cpb, swin"])
def test_zeros_are_plain_attention_and_every_parameter_learns(name):
    position = LEARNED[name](DIM // HEADS, HEADS, init_std=0.0, device="meta").to_empty(device="cpu")
    position.reset_parameters()
    attn, grid, x = layer(None), make_grid(3, 5, prefix=1), draw(2, 16, DIM)
    attn.position = position.double()
    torch.testing.assert_close(attn(x, grid), plain(attn)(x), rtol=0, atol=1e-6)
    optimizer = torch.optim.SGD(attn.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        attn(x, grid).square().sum().backward()
        optimizer.step()
    # The threshold of FIRE is below the size of the image.
    assert all(parameter.grad.any() for key, parameter in position.named_parameters() if key != "threshold")


@pytest.mark.parametrize("backend", ["fused", "tiled"])
@pytest.mark.parametrize("name", LEARNED)
def test_half_precision_stays_near(name, backend):
    position, grid = LEARNED[name](DIM // HEADS, HEADS), make_grid(9, 13)
    attn = layer(position, backend="gathered" if name.startswith("cpb") else backend)
    x = draw(2, num_tokens(grid), DIM)
    expected = attn(x, grid).detach()
    atol = 0.05 * float(expected.abs().max())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attn.float()(x.float(), grid).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    torch.testing.assert_close(attn.bfloat16()(x.bfloat16(), grid).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["xl", "pape", "rope"])
def test_queries_and_memory_on_grids_of_their_own(name):
    attn = layer(None if name == "rope" else LEARNED[name](DIM // HEADS, HEADS))
    if name == "rope":
        attn.rope = RotaryEmbedding2d(DIM // HEADS, HEADS, "axial")
    # The last two rows of an image whose first ones are a memory.
    whole, x = make_grid(5, 3), draw(2, 15, DIM)
    last = make_grid(5, 3, coords=torch.stack((torch.arange(6) // 3 + 3, torch.arange(6) % 3), dim=-1))
    got = attn(x[:, 9:], last, memory=x[:, :9], key_grid=whole)
    torch.testing.assert_close(got, attn(x, whole)[:, 9:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("maker", [*LEARNED.values(), AxialPositionEmbedding], ids=[*LEARNED, "axial"])
def test_a_negative_deviation_is_refused(maker):
    with pytest.raises(ValueError, match="init_std must not be negative"):
        maker(4, 2, init_std=-0.1)
