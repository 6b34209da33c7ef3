"""ALiBi's slopes: the published numbers, and timm's attention with the bias as a mask."""

import itertools
import math

import pytest
import torch
from timm.layers import Attention
from timm.models._manipulate import reinit_non_persistent_buffers

from relvit.layers import RelativeAttention, SlopePosition2d
from relvit.ops import RelativeTerms, make_grid

HEIGHT, WIDTH, HEADS, DIM = 3, 5, 8, 16
POWERS = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def bias_by_hand(slopes, height, width, prefix, reach):
    """-m (|dy| + |dx|) pair by pair, zero where a prefix token takes part: (heads, N, N) float64."""
    tokens = [None] * prefix + [(y, x) for y in range(height) for x in range(width)]

    def distance(one, other):
        if one is None or other is None:
            return 0
        return sum(min(abs(a - b), most) for a, b, most in zip(one, other, reach, strict=True))

    distances = torch.tensor([[distance(one, other) for other in tokens] for one in tokens], dtype=torch.float64)
    return torch.stack([-slope * distances for slope in slopes])


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (8, POWERS),
        # 2^-1 ... 2^-8, then the first, third ... of 16 heads: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
        (12, [*POWERS, 0.7071067811865476, 0.3535533905932738, 0.1767766952966369, 0.08838834764831845]),
    ],
)
def test_slopes_are_those_of_the_paper(heads, slopes):
    position = SlopePosition2d(4, heads)
    torch.testing.assert_close(position.slopes, torch.tensor(slopes), rtol=1e-7, atol=0)
    assert not list(position.parameters())
    assert position.state_dict() == {}


@pytest.mark.parametrize(("prefix", "max_distance", "reach"), [(1, None, (HEIGHT, WIDTH)), (0, (1, 3), (1, 3))])
@pytest.mark.parametrize("backend", ["reference", "fused", "tiled"])
def test_layer_equals_plain_attention_with_the_bias_as_a_mask(prefix, max_distance, reach, backend):
    torch.manual_seed(0)
    position = SlopePosition2d(DIM // HEADS, HEADS, max_distance=max_distance)
    attn = RelativeAttention(DIM, HEADS, qkv_bias=True, position=position, backend=backend).double()
    plain = Attention(DIM, HEADS, qkv_bias=True).double()
    plain.load_state_dict(attn.state_dict())
    grid = make_grid(HEIGHT, WIDTH, prefix)
    x = torch.randn(2, prefix + HEIGHT * WIDTH, DIM, dtype=torch.float64)
    bias = bias_by_hand(POWERS, HEIGHT, WIDTH, prefix, reach)
    torch.testing.assert_close(attn(x, grid), plain(x, attn_mask=bias[None]), rtol=0, atol=1e-12)
    assert position(grid)._replace(bias=None) == RelativeTerms()


@pytest.mark.parametrize("max_distance", [None, (1, 3)])
@pytest.mark.parametrize("backend", ["reference", "gathered", "auto"])
def test_euclidean_distance_of_croma(max_distance, backend):
    position = SlopePosition2d(DIM // HEADS, HEADS, max_distance, distance="euclidean")
    attn = RelativeAttention(DIM, HEADS, position=position, backend=backend).double()
    plain, grid = Attention(DIM, HEADS).double(), make_grid(HEIGHT, WIDTH, prefix=1)
    plain.load_state_dict(attn.state_dict())
    x = torch.randn(2, 1 + HEIGHT * WIDTH, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # As in the authors' get_2dalibi, for H != W.
    rows, cols = max_distance or (HEIGHT, WIDTH)
    points = list(itertools.product(range(HEIGHT), range(WIDTH)))
    bias = torch.zeros(HEADS, len(x[0]), len(x[0]), dtype=torch.float64)
    for (i, here), (j, there) in itertools.product(enumerate(points, 1), repeat=2):
        dy, dx = min(abs(here[0] - there[0]), rows), min(abs(here[1] - there[1]), cols)
        bias[:, i, j] = -torch.tensor(POWERS, dtype=torch.float64) * math.sqrt(dy**2 + dx**2)
    torch.testing.assert_close(attn(x, grid), plain(x, attn_mask=bias[None]), rtol=0, atol=1e-12)
    position.trained_grid = (HEIGHT, 3)
    table = position(grid).bias.table
    # One column in five is 3 / 5 of one in training.
    expected = -math.sqrt(min(1, rows) + min(4 * 3 / 5, cols) ** 2) / 256
    assert table[-1, HEIGHT, -1].item() == pytest.approx(expected, abs=1e-12)


def test_tables_reach_as_far_as_each_grid():
    position = SlopePosition2d(2, 2)
    bias = position(make_grid(2, 4)).bias
    assert bias.rows.tolist() == [[-1 / 16, 0, -1 / 16], [-1 / 256, 0, -1 / 256]]
    assert (bias.cols[0] * 16).tolist() == [-3, -2, -1, 0, -1, -2, -3]
    bias = SlopePosition2d(2, 2, max_distance=(2, 1))(make_grid(2, 4)).bias
    assert (bias.cols[0] * 16).tolist() == [-1, -1, -1, 0, -1, -1, -1]


def test_made_on_the_meta_device_and_filled_by_timm():
    position = SlopePosition2d(2, 12, device="meta", dtype=torch.float64)
    assert (position.slopes.device.type, position.slopes.dtype) == ("meta", torch.float32)
    position = position.to_empty(device="cpu")
    position.slopes.fill_(torch.nan)
    reinit_non_persistent_buffers(position)
    assert torch.equal(position.slopes, SlopePosition2d(2, 12).slopes)
    assert position.double()(make_grid(2, 3)).bias.rows.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"num_heads": 2, "distance": "euclid"}, ValueError, "distance is 'euclid'; allowed are .*'euclidean'"),
        ({"num_heads": 2, "max_distance": -1}, ValueError, "max_distance must be at least 0, got -1"),
        ({"num_heads": 2, "max_distance": (1, 2.0)}, TypeError, "max_distance must hold integers"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        SlopePosition2d(4, **arguments)
