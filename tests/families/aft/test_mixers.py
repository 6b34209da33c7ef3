"""Attention-free mixers compared with the paper's parametrisation, and arguments that they refuse."""

import pytest
import torch
from oracles import aft as oracle
from timm.layers import resample_abs_pos_embed

from relvit.families.aft import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.ops import make_grid

GRID = make_grid(2, 3, prefix=1)
OPTIONS = {
    AFTSimple: {},
    AFTFull: {"grid_size": (2, 3), "prefix": 1, "bias_dim": 4},
    AFTLocal: {"grid_size": (2, 3), "prefix": 1, "bias_dim": 4, "window": (1, 2)},
    AFTConv2d: {"kernel_size": (3, 5)},
}


def make(kind, dim=8, heads=2, **options):
    torch.manual_seed(0)
    layer = kind(dim, heads, **OPTIONS[kind] | options).double()
    # Initial gains and offsets of zero would hide errors in the factors, so draw all parameters at random.
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def tokens(count=7, dim=8):
    return torch.randn(2, count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def bias_by_hand(layer):
    """Compute w(head, here, there) from the layer's parameters; a place is (row, column), or None for prefix tokens."""
    if isinstance(layer, AFTConv2d):
        filters = []
        for head in range(layer.num_heads):
            raw = layer.kernel[head].detach()
            normal = (raw - raw.mean()) / raw.std(unbiased=False)
            filters.append(layer.gamma[head].detach() * normal + layer.beta[head].detach())
        weight = torch.stack(filters)
        return lambda head, here, there: oracle.conv_bias(weight, head, here, there)
    if not isinstance(layer, AFTFull):
        return lambda head, here, there: 0.0
    reach = layer.window if isinstance(layer, AFTLocal) else (9, 9)

    def bias(head, here, there):
        if here and there and any(abs(a - b) >= most for a, b, most in zip(here, there, reach, strict=True)):
            return 0.0
        i, j = (0 if place is None else 1 + 3 * place[0] + place[1] for place in (here, there))
        return float((layer.u[i].detach() * layer.v[j].detach()).sum())

    return bias


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_what_the_paper_says(kind, causal):
    layer, x = make(kind), tokens()
    wide, narrow = 8, 2 if kind is AFTConv2d else 8
    q, k, v = torch.nn.functional.linear(x, layer.qkv.weight, layer.qkv.bias).detach().split((wide, narrow, wide), -1)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v))
    mixed = oracle.aft(q, k, v, GRID, bias_by_hand(layer), causal)
    expected = layer.proj(mixed.transpose(1, 2).flatten(2))
    # Filters are normalised with a small number added to their deviation, which the formula here lacks.
    atol = 1e-7 if kind is AFTConv2d else 1e-11
    torch.testing.assert_close(layer(x, GRID, is_causal=causal), expected, rtol=0, atol=atol)
    # `backend` can be changed after the construction.
    for layer.backend in () if causal else kind.backends:
        torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=atol)


def test_filters_start_as_aft_simple_and_learn_from_the_second_step_on():
    torch.manual_seed(0)
    layer = AFTConv2d(8, 2, kernel_size=3).double()
    assert (layer.learned_bias(GRID) == 0).all()
    # The filter of a window of one place has the standard deviation 0, by which it must not be divided.
    narrow = AFTConv2d(8, 2, kernel_size=1).double()
    torch.nn.init.ones_(narrow.gamma)
    assert (narrow.learned_bias(GRID) == 0).all()
    # If all numbers of a filter were equal, the filter would never learn.
    assert (layer.kernel.flatten(1).std(dim=1) > 0.005).all()
    # In half precision about one number in 500 would be -2, if it were drawn in that precision.
    assert AFTConv2d(8, 2, kernel_size=99, dtype=torch.bfloat16).kernel.abs().max() < 0.2
    x = tokens()
    layer(x, GRID).square().sum().backward()
    assert (layer.kernel.grad == 0).all()
    assert (layer.gamma.grad != 0).all()
    assert (layer.beta.grad != 0).all()
    with torch.no_grad():
        layer.gamma -= 0.1 * layer.gamma.grad
    layer.zero_grad()
    layer(x, GRID).square().sum().backward()
    assert (layer.kernel.grad.flatten(1).abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("kind", [AFTFull, AFTLocal, AFTConv2d])
def test_biases_of_half_precision_layers_are_computed_in_float32(kind):
    layer = make(kind).bfloat16()
    bias = layer.learned_bias(GRID)
    assert bias.dtype == torch.float32
    torch.testing.assert_close(bias.double(), layer.double().learned_bias(GRID), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [AFTFull, AFTLocal])
def test_factors_are_interpolated_on_other_grids(kind):
    layer, grid, x = make(kind), make_grid(4, 5, prefix=1), tokens(21)
    expected = [
        resample_abs_pos_embed(factor.detach()[None], new_size=(4, 5), old_size=(2, 3), num_prefix_tokens=1)[0]
        for factor in (layer.u, layer.v)
    ]
    bias = expected[0] @ expected[1].T
    if kind is AFTLocal:
        place = torch.cartesian_prod(torch.arange(4), torch.arange(5))
        far = ((place[:, None] - place).abs() >= torch.tensor(layer.window)).any(-1)
        bias[1:, 1:][far] = 0
    # timm interpolates in single precision.
    torch.testing.assert_close(layer.learned_bias(grid), bias, rtol=0, atol=1e-5)
    before = layer(x, grid)
    layer.set_grid_size((4, 5))
    assert layer.u.shape == (21, 4)
    torch.testing.assert_close(layer(x, grid), before, rtol=0, atol=1e-12)


def test_errors():
    x = tokens()
    cases = [
        (TypeError, "argument 'bias_dims'", lambda: AFTLocal(8, grid_size=2, window=2, bias_dims=3)),
        (ValueError, "kernel_size must be odd", lambda: AFTConv2d(8, 2, kernel_size=(3, 4))),
        (TypeError, "kernel_size must hold integers", lambda: AFTConv2d(8, 2, kernel_size=3.0)),
        (ValueError, "bias_dim must be at least 1", lambda: AFTFull(8, grid_size=2, bias_dim=0)),
        (ValueError, "backend is 'referenc'; allowed are", lambda: make(AFTSimple, backend="referenc")),
        (ValueError, "window must be at least 0", lambda: AFTLocal(8, grid_size=2, window=-1)),
        (ValueError, "for 1: build the layer with prefix=0, or give", lambda: make(AFTFull)(x, make_grid(1, 7))),
    ]  # fmt: skip
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
