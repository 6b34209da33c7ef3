import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models._features_fx import create_feature_extractor
from timm.models._manipulate import reinit_non_persistent_buffers

from relvit.layers import RelativeAttention, SlopePosition2d
from relvit.ops import Grid, RelativeTerms, make_grid

HEIGHT, WIDTH, HEADS, DIM = 3, 5, 8, 16
POWERS = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def bias_by_hand(slopes, height, width, prefix, reach):
    """-m (|dy| + |dx|) pair by pair, zero where a prefix token takes part: (heads, N, N) float64."""
    places = [None] * prefix + [(y, x) for y in range(height) for x in range(width)]

    def distance(one, other):
        if one is None or other is None:
            return 0
        return sum(min(abs(a - b), most) for a, b, most in zip(one, other, reach, strict=True))

    distances = torch.tensor([[distance(one, other) for other in places] for one in places], dtype=torch.float64)
    return torch.stack([-slope * distances for slope in slopes])


def layers(**kwargs):
    """The layer with slopes, and timm's attention with the same weights."""
    torch.manual_seed(0)
    attn = RelativeAttention(DIM, HEADS, qkv_bias=True, position=SlopePosition2d(DIM // HEADS, HEADS, **kwargs))
    plain = Attention(DIM, HEADS, qkv_bias=True)
    plain.load_state_dict(attn.state_dict())
    return attn.eval(), plain.eval()


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (8, POWERS),
    ],
)
def test_slopes_that_are_powers_of_two(heads, slopes):
    assert SlopePosition2d(4, heads).slopes.tolist() == slopes


def test_slopes_between_powers_of_two():
    # 2^-1 ... 2^-8, then the first, third ... of 16 heads: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
    between = [0.7071067811865476, 0.3535533905932738, 0.1767766952966369, 0.08838834764831845]
    expected = torch.tensor([*POWERS, *between])
    torch.testing.assert_close(SlopePosition2d(4, 12).slopes, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize(
    ("max_distance", "reach"), [(None, (HEIGHT, WIDTH)), (2, (2, 2)), ((1, 3), (1, 3)), (0, (0, 0)), (9, (9, 9))]
)
@pytest.mark.parametrize("backend", ["reference", "fused", "tiled"])
def test_layer_equals_plain_attention_with_the_bias_as_a_mask(prefix, max_distance, reach, backend):
    attn, plain = (layer.double() for layer in layers(max_distance=max_distance))
    attn.backend = backend
    grid = make_grid(HEIGHT, WIDTH, prefix)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, prefix + HEIGHT * WIDTH, DIM, generator=generator, dtype=torch.float64)
    bias = bias_by_hand(POWERS, HEIGHT, WIDTH, prefix, reach)
    torch.testing.assert_close(attn(x, grid), plain(x, attn_mask=bias[None]), rtol=0, atol=1e-12)
    assert attn.position(grid)._replace(bias=None) == RelativeTerms()


def test_tables_reach_as_far_as_each_grid():
    position = SlopePosition2d(2, 2)
    bias = position(make_grid(2, 4)).bias
    assert bias.rows.tolist() == [[-1 / 16, 0, -1 / 16], [-1 / 256, 0, -1 / 256]]
    assert (bias.cols[0] * 16).tolist() == [-3, -2, -1, 0, -1, -2, -3]
    assert position(make_grid(7, 1)).bias.rows.shape == (2, 13)
    assert SlopePosition2d(2, 2, max_distance=(2, 1))(make_grid(7, 9)).bias.cols.shape == (2, 3)


def test_nothing_is_learned_or_saved():
    position = SlopePosition2d(2, 3)
    assert not list(position.parameters())
    assert position.state_dict() == {}


def test_dtype_and_device():
    position = SlopePosition2d(2, 12, device="meta", dtype=torch.float64)
    assert position.slopes.device.type == "meta"
    assert position.slopes.dtype == torch.float32
    position = position.to_empty(device="cpu")
    position.slopes.fill_(torch.nan)
    reinit_non_persistent_buffers(position)
    assert torch.equal(position.slopes, SlopePosition2d(2, 12).slopes)
    assert position.double()(make_grid(2, 3)).bias.rows.dtype == torch.float64


def test_autocast():
    attn, plain = layers()
    x = torch.randn(2, HEIGHT * WIDTH, DIM, generator=torch.Generator().manual_seed(1))
    expected = attn(x, make_grid(HEIGHT, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = attn(x, make_grid(HEIGHT, WIDTH))
    assert half.dtype == torch.bfloat16
    error = F.mse_loss(half.float(), expected)
    assert error < 0.01 * F.mse_loss(plain(x), expected)


class Positioned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.position = SlopePosition2d(2, 2)

    def forward(self, x):
        return self.position(Grid(x.shape[0], x.shape[1]))


def test_a_traced_graph_serves_every_size():
    module = Positioned()
    graph = create_feature_extractor(module, {"position": "terms"})
    for height in (3, 6):
        x = torch.zeros(height, 2)
        assert torch.equal(graph(x)["terms"].bias.rows, module(x).bias.rows)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"num_heads": 2, "max_distance": -1}, ValueError, "max_distance must be at least 0, got -1"),
        ({"num_heads": 2, "max_distance": (1, 2.0)}, TypeError, "max_distance must hold integers"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        SlopePosition2d(4, **arguments)
