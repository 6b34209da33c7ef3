"""FIRE compared with the authors' module, and Swin V2's continuous bias with timm's `RelPosMlp`, in float64."""

import math

import pytest
import torch
from position_cases import DIM, HEADS
from timm.layers import RelPosMlp
from torch import nn

from relvit.layers import ContinuousPosition2d, FirePosition2d
from relvit.ops import Grid, make_grid
from relvit.ops.reference.attention import pair_bias

GRIDS = [make_grid(3, 5), make_grid(6, 2, prefix=2), make_grid(1, 4, prefix=1)]
MAKERS = {
    "fire": FirePosition2d,
    "cr": ContinuousPosition2d,
    "swin": lambda *given, **options: ContinuousPosition2d(*given, mode="swin", window=(4, 3), **options),
}


def drawn(name):
    torch.manual_seed(0)
    position = MAKERS[name](DIM // HEADS, HEADS).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def authors_fire(network, c, threshold, length):
    """Compute the module in the paper's appendix for a sequence, (heads, query, key)."""
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
            # The authors' module is causal: compare the offsets of keys up to the query itself.
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
    # timm computes the coordinates in single precision.
    got = pair_bias(position(grid), grid, grid, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(got, theirs.get_bias(), rtol=0, atol=2e-5)


def test_layers_that_pytorch_has_quantised_are_near():
    position = drawn("cr").float()
    quantised = torch.ao.quantization.quantize_dynamic(position, {nn.Linear})
    for grid in GRIDS:
        expected = position(grid).bias.table
        error = quantised(grid).bias.table - expected
        assert 0 < error.norm() < 0.05 * expected.norm()


def test_constants_made_in_a_transform_are_not_used_after_it():
    """Tensors made within a transform of torch.func, such as cached offsets, must not be used after it."""
    position, weight = drawn("cr"), torch.randn(512, 2, dtype=torch.float64)

    def loss(weight):
        # No other test uses this grid, so its offsets are not cached yet.
        given = {"mlp.fc1.weight": weight}
        return torch.func.functional_call(position, given, (make_grid(11, 13),)).bias.table.square().sum()

    expected = torch.func.jvp(torch.func.grad(loss), (weight,), (weight,))[0]
    torch.testing.assert_close(torch.func.grad(loss)(weight), expected, rtol=1e-12, atol=0)


def test_fire_refuses_a_padded_batch_whose_images_differ_in_size():
    valid = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="FirePosition2d depends on the size of the image"):
        FirePosition2d(4, 2)(Grid(2, 3, coords=torch.zeros(1, 1, 2, dtype=torch.int64), valid=valid))
