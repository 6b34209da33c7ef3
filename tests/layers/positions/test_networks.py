"""FIRE against the authors' module, pair by pair, and Swin V2's continuous bias against timm's `RelPosMlp`; float64."""

import math

import pytest
import torch
from timm.layers import Attention, RelPosMlp
from torch import nn

from relvit.layers import ContinuousPosition2d, FirePosition2d, RelativeAttention
from relvit.ops import Grid, make_grid
from relvit.ops.reference.attention import pair_bias

DIM, HEADS = 8, 2
GRIDS = [make_grid(3, 5), make_grid(6, 2, prefix=2), make_grid(1, 4, prefix=1)]
DROPPED = make_grid(4, 6, prefix=1, coords=torch.tensor([[3, 5], [0, 1], [2, 2]]))
MAKERS = {
    "fire": FirePosition2d,
    "cr": ContinuousPosition2d,
    "swin": lambda *given, **options: ContinuousPosition2d(*given, mode="swin", window=(4, 3), **options),
}


def drawn(name, std=1.0, **options):
    torch.manual_seed(0)
    position = MAKERS[name](DIM // HEADS, HEADS, **options).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter, std=std)
    return position


def authors_fire(network, c, threshold, length):
    """The module of the paper's appendix for a sequence: query i, key j, (heads, i, j)."""
    place = torch.arange(length, dtype=torch.float64)
    distance = torch.log((c * (place[:, None] - place)).abs() + 1)
    divisor = torch.log((c * place.clamp(min=threshold.abs())).abs() + 1) + 1e-6
    return network((distance / divisor[:, None])[..., None]).permute(2, 0, 1)


def test_fire_is_the_papers_formula_for_the_last_token():
    position = drawn("fire")
    for height, width in ((1, 5), (9, 4)):
        position.threshold.data = torch.tensor([3.0, -2.5], dtype=torch.float64)
        tables = position(make_grid(height, width)).bias
        axes = ((position.rows, height), (position.cols, width))
        for axis, (table, (network, size)) in enumerate(zip(tables, axes, strict=True)):
            expected = authors_fire(network, position.c[axis], position.threshold[axis], size)[:, -1]
            # Keys from the first on, up to the query itself.
            torch.testing.assert_close(table[:, :size], expected, rtol=0, atol=1e-12)


def test_fire_on_both_sides_of_every_token():
    position, grid = drawn("fire"), make_grid(4, 3, prefix=1)
    got = pair_bias(position(grid), grid, grid, torch.zeros((), dtype=torch.float64))[0]

    def u(offset, size, axis):
        c, longest = position.c[axis].item(), max(abs(position.threshold[axis].item()), size - 1)
        quotient = math.log(abs(c * offset) + 1) / (math.log(abs(c * longest) + 1) + 1e-6)
        return torch.tensor([math.copysign(quotient, offset)], dtype=torch.float64)

    assert not got[:, 0].any()
    assert not got[:, :, 0].any()
    for i in range(12):
        for j in range(12):
            (y, x), (v, w) = divmod(i, 3), divmod(j, 3)
            expected = position.rows(u(y - v, 4, 0)) + position.cols(u(x - w, 3, 1))
            torch.testing.assert_close(got[:, 1 + i, 1 + j], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.height}x{grid.width}")
@pytest.mark.parametrize("mode", ["cr", "swin"])
def test_continuous_bias_is_timms(mode, grid):
    position = drawn(mode)
    options = {"mode": mode, "pretrained_window_size": (4, 3), "prefix_tokens": grid.prefix}
    theirs = RelPosMlp((grid.height, grid.width), HEADS, 512, **options).double().eval()
    theirs.load_state_dict(position.state_dict())
    # timm's coordinates are computed in single precision.
    got = pair_bias(position(grid), grid, grid, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(got, theirs.get_bias(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("grid", [GRIDS[1], DROPPED], ids=["raster", "dropped"])
def test_layer_with_gradients_equals_attention_with_the_bias_as_a_mask(name, grid):
    position = drawn(name)
    attn = RelativeAttention(DIM, HEADS, position=position, qkv_bias=True).double()
    plain = Attention(DIM, HEADS, qkv_bias=True).double()
    plain.load_state_dict({key: value for key, value in attn.state_dict().items() if "position" not in key})
    tokens = grid.prefix + (12 if grid.coords is None else 3)
    x = torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got, expected = attn(x, grid), plain(x, attn_mask=pair_bias(position(grid), grid, grid, x))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    parameters = list(position.parameters())
    grads = [torch.autograd.grad(out.sin().sum(), parameters) for out in (got, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MAKERS)
def test_stretched_to_another_size(name):
    """At twice the size the offset 2d has what d has at the trained size."""
    position = drawn(name)
    trained = position(make_grid(4, 5)).bias
    position.trained_grid = (4, 5)
    assert all(map(torch.equal, position(make_grid(4, 5)).bias, trained))
    stretched = position(make_grid(8, 10)).bias
    for one, other in zip(stretched, trained, strict=True):
        step = (slice(None), *[slice(1, None, 2)] * (one.dim() - 1))
        torch.testing.assert_close(one[step], other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_half_precision_stays_near(name):
    position, grid = drawn(name, std=0.2).float(), make_grid(9, 13)
    expected = position(grid).bias
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = position(grid).bias
    for got in (under_autocast, position.bfloat16()(grid).bias):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0, atol=0.03 * float(other.detach().abs().max()))


@pytest.mark.parametrize("name", ["fire", "cr"])
def test_zeros_are_plain_attention_and_every_parameter_learns(name):
    position = MAKERS[name](DIM // HEADS, HEADS, init_std=0.0, device="meta").to_empty(device="cpu")
    position.init_weights()
    assert not any(table.any() for table in position(make_grid(3, 4)).bias)
    if name == "fire":
        nn.init.constant_(position.threshold, 1.0)
    optimizer = torch.optim.SGD(position.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(
            ((table - 1) * torch.linspace(-1, 2, table.shape[-1])).square().sum()
            for table in position(make_grid(3, 4)).bias
        ).backward()
        optimizer.step()
    learned = [part.grad.any() for key, part in position.named_parameters() if key != "threshold"]
    assert all(learned)


def test_errors():
    for maker in (FirePosition2d, ContinuousPosition2d):
        with pytest.raises(ValueError, match="init_std must not be negative, got -1"):
            maker(4, 2, init_std=-1)
    with pytest.raises(ValueError, match=r"mode is 'swim'; allowed are 'cr', 'swin'.*did you mean 'swin'"):
        ContinuousPosition2d(4, 2, mode="swim")
    with pytest.raises(ValueError, match="window must be at least 2, got 1"):
        ContinuousPosition2d(4, 2, window=1)
    valid = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="FIRE divides by the size of the image"):
        FirePosition2d(4, 2)(Grid(2, 3, coords=torch.zeros(1, 1, 2, dtype=torch.int64), valid=valid))
