"""LookHere: fields of view and slopes of the paper, pair by pair, as a boolean mask; layers get their index."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from position_cases import draw

import relvit
from relvit.layers import LookHerePosition2d
from relvit.ops import make_grid, relative_attention

HEIGHT, WIDTH = 3, 5
# Each field of view is a sector of a circle, given by conditions on the offset from query to key.
HALVES = [lambda y, x: y <= 0, lambda y, x: y >= 0, lambda y, x: x <= 0, lambda y, x: x >= 0]
DIAGONALS = [lambda y, x: x >= y, lambda y, x: -x >= y, lambda y, x: x >= -y, lambda y, x: -x >= -y]
QUARTERS = [lambda y, x, a=a, b=b: HALVES[a](y, x) and HALVES[b](y, x) for a in (0, 1) for b in (2, 3)]
UPPER, LOWER = (lambda y, x: -y >= abs(x)), (lambda y, x: y >= abs(x))
LEFTER, RIGHTER = (lambda y, x: -x >= abs(y)), (lambda y, x: x >= abs(y))
EIGHTHS = [
    lambda y, x: UPPER(y, x) and x <= 0,
    lambda y, x: LOWER(y, x) and x <= 0,
    lambda y, x: LEFTER(y, x) and y <= 0,
    lambda y, x: RIGHTER(y, x) and y <= 0,
    lambda y, x: UPPER(y, x) and x >= 0,
    lambda y, x: LOWER(y, x) and x >= 0,
    lambda y, x: LEFTER(y, x) and y >= 0,
    lambda y, x: RIGHTER(y, x) and y >= 0,
]
EVERYWHERE = [lambda y, x: True]
HEADS_AND_VIEWS = [(4, 180), (4, 90), (6, 180), (12, 180), (12, 90), (12, 45), (16, 180), (16, 45), (18, 90)]
# The paper's ViT-B directs eight heads eight different ways: the four directions along the axes and the four diagonals,
# or, with 45 degrees, eight views that cover the image (Fuller et al. 2024, section 3). In the authors' code these are
# the layouts 'halves-diagonals-none', 'corners-triangles-none' and 'eighths1-eighths2-none'.
SECTORS = {180: HALVES + DIAGONALS, 90: [*QUARTERS, UPPER, LOWER, LEFTER, RIGHTER], 45: EIGHTHS}
DIRECTED = {4: [0.5] * 4, 6: [0.5] * 4, 12: [0.5] * 8, 16: [0.5] * 8, 18: [0.5] * 8 + [0.25] * 4}
OTHERS = {
    4: [],
    6: [1 / 4, 1 / 16],
    12: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
    16: [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64, 1 / 256, 1 / 256],
    18: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 4, 1 / 16],
}


def by_hand(heads, view, prefix):
    """Compute which keys each head sees, and slope times distance (zero for prefix tokens), both (heads, N, N)."""
    directed_slopes = DIRECTED[heads]
    directed = len(directed_slopes)
    sees = (SECTORS[view] * 2)[:directed] + EVERYWHERE * (heads - directed)
    tokens = [None] * prefix + [(y, x) for y in range(HEIGHT) for x in range(WIDTH)]

    def of(see, slope, one, other):
        if one is None or other is None:
            return True, 0.0
        dy, dx = other[0] - one[0], other[1] - one[1]
        return see(dy, dx), slope * math.hypot(dy, dx)

    slopes = directed_slopes + OTHERS[heads]
    pairs = [[[of(*head, i, j) for j in tokens] for i in tokens] for head in zip(sees, slopes, strict=True)]
    found = torch.tensor(pairs, dtype=torch.float64)
    return found[..., 0].bool(), found[..., 1]


@pytest.mark.parametrize(("heads", "view"), HEADS_AND_VIEWS)
@pytest.mark.parametrize("prefix", [0, 1])
def test_attention_is_that_under_a_boolean_mask(heads, view, prefix):
    position = LookHerePosition2d(8, heads, view, layer=(1, 3)).double()
    grid = make_grid(HEIGHT, WIDTH, prefix)
    q, k, v = draw(3, 2, heads, HEIGHT * WIDTH + prefix, 8).requires_grad_()
    seen, distances = by_hand(heads, view, prefix)
    # Slopes are multiplied by 1.5 in the first and 0.5 in the last of three layers, so by 1 in the second.
    expected = F.scaled_dot_product_attention(q, k, v, (-distances).masked_fill(~seen, -torch.inf))
    got = relative_attention(q, k, v, position(grid), grid)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (got, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    assert all(seen[head].diagonal().all() for head in range(heads))


def test_what_is_hidden_stays_hidden_in_half_precision():
    position, grid = LookHerePosition2d(8, 4), make_grid(HEIGHT, WIDTH)
    q, k, v = draw(3, 1, 4, HEIGHT * WIDTH, 8).half()
    v[..., -WIDTH:, :] = 1000
    out = relative_attention(q, k, v, position(grid), grid)
    # The first head looks up, so only queries in the last row see the values there.
    assert out[:, 0, :-WIDTH].abs().max() < 10


@pytest.mark.parametrize("made", ["model", "retrofit"])
def test_slopes_fall_from_layer_to_layer(made):
    if made == "model":
        model = timm.create_model("test_relvit", position="lookhere", num_heads=4, depth=3)
    else:
        model = relvit.retrofit(timm.create_model("test_vit", num_heads=4, depth=3), position=LookHerePosition2d)
    firsts = [block.attn.position.slopes[0].item() for block in model.blocks]
    assert firsts == pytest.approx([0.75, 0.5, 0.25])
