"""ALiBi's slopes compared with the published numbers, and the bias with its formula, pair by pair."""

import math

import pytest
import torch
from position_cases import HEADS

from relvit.layers import SlopePosition2d
from relvit.ops import RelativeTerms, make_grid
from relvit.ops.reference.attention import pair_bias

HEIGHT, WIDTH, DIM = 3, 5, 8
SLOPES = [1 / 16, 1 / 256]
POWERS = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def bias_by_hand(distance, prefix, reach):
    """Compute -m |(dy, dx)| pair by pair, zero with a prefix token, (heads, N, N) float64."""
    tokens = [None] * prefix + [(y, x) for y in range(HEIGHT) for x in range(WIDTH)]

    def length(one, other):
        if one is None or other is None:
            return 0
        dy, dx = (min(abs(a - b), most) for a, b, most in zip(one, other, reach, strict=True))
        # This is the bias of the authors' get_2dalibi of CROMA, for H != W.
        return dy + dx if distance == "manhattan" else math.sqrt(dy**2 + dx**2)

    lengths = torch.tensor([[length(one, other) for other in tokens] for one in tokens], dtype=torch.float64)
    return torch.stack([-slope * lengths for slope in SLOPES])


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (8, POWERS),
        # The slopes are 2^-1 ... 2^-8, then the first, third ... slope of 16 heads: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
        (12, [*POWERS, 0.7071067811865476, 0.3535533905932738, 0.1767766952966369, 0.08838834764831845]),
    ],
)
def test_slopes_are_those_of_the_paper(heads, slopes):
    position = SlopePosition2d(4, heads)
    torch.testing.assert_close(position.slopes, torch.tensor(slopes), rtol=1e-7, atol=0)


@pytest.mark.parametrize(("prefix", "max_distance", "reach"), [(1, None, (HEIGHT, WIDTH)), (0, (1, 3), (1, 3))])
@pytest.mark.parametrize("distance", ["manhattan", "euclidean"])
def test_the_bias_falls_with_the_distance(distance, prefix, max_distance, reach):
    position = SlopePosition2d(DIM // HEADS, HEADS, max_distance, distance).double()
    grid = make_grid(HEIGHT, WIDTH, prefix)
    got = pair_bias(position(grid), grid, grid, torch.zeros((), dtype=torch.float64))[0]
    torch.testing.assert_close(got, bias_by_hand(distance, prefix, reach), rtol=0, atol=1e-12)
    assert position(grid)._replace(bias=None) == RelativeTerms()
    if distance == "euclidean":
        position.trained_grid = (HEIGHT, 3)
        # The image is five columns wide and was three columns wide in training, so a column counts as 3 / 5.
        expected = -math.sqrt(min(1, reach[0]) + min(4 * 3 / 5, reach[1]) ** 2) / 256
        assert position(grid).bias.table[-1, HEIGHT, -1].item() == pytest.approx(expected, abs=1e-12)
