"""Tables of `RelativePosition2d`: shapes, initialisation, gradients."""

import pytest
import torch

from relvit.layers import RelativePosition2d
from relvit.ops import RelativeTerms, make_grid, relative_attention


def test_shapes_and_parameters_by_letter():
    grid = make_grid(2, 2)
    terms = RelativePosition2d(8, 3, max_distance=(3, 5), bucketing="piecewise", rel_terms="kvb")(grid)
    assert terms.key.rows.shape == terms.value.rows.shape == (7, 8)
    assert terms.key.cols.shape == terms.value.cols.shape == (11, 8)
    assert (terms.bias.rows.shape, terms.bias.cols.shape) == ((3, 7), (3, 11))
    assert (terms.query, terms.bucketing) == (None, "piecewise")
    assert RelativePosition2d(8, 2, max_distance=0, shared_heads=False)(grid).key.rows.shape == (2, 1, 8)
    joint = RelativePosition2d(8, 3, rel_terms="kb", max_distance=(2, 4), layout="joint")(grid)
    assert (joint.key.table.shape, joint.bias.table.shape) == ((5, 9, 8), (3, 5, 9))
    only_keys = RelativePosition2d(8, 2, rel_terms="k")
    assert set(dict(only_keys.named_parameters())) == {"key_rows", "key_cols"} == only_keys.no_weight_decay()
    nothing = RelativePosition2d(8, 2, rel_terms="")
    assert nothing(grid) == RelativeTerms()
    assert not list(nothing.parameters())


def test_initialisation_is_a_truncated_normal_or_zero():
    torch.manual_seed(0)
    position = RelativePosition2d(64, 1, max_distance=50)
    for _ in range(2):
        tables = torch.cat(list(position.parameters())).detach()
        assert abs(float(tables.std()) - 0.1) < 0.005
        assert abs(float(tables.mean())) < 0.001
        torch.nn.init.constant_(position.key_rows, torch.nan)
        position.reset_parameters()
    assert not any(table.any() for table in RelativePosition2d(8, 1, init_std=0).parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_initialisation_in_half_precision_is_that_of_float32_rounded(dtype):
    tables = []
    for kind in (dtype, torch.float32):
        torch.manual_seed(0)
        tables.append(RelativePosition2d(64, 1, max_distance=50, dtype=kind).state_dict())
    for half, single in zip(*(one.values() for one in tables), strict=True):
        assert torch.equal(half, single.to(dtype))


def test_gradients_reach_only_the_offsets_that_occur():
    position = RelativePosition2d(4, 1, max_distance=5)
    q = k = v = torch.randn(1, 1, 6, 4)
    relative_attention(q, k, v, position(make_grid(2, 3)), make_grid(2, 3)).square().sum().backward()
    touched = position.value_rows.grad.abs().sum(-1) > 0
    assert touched.tolist() == [False] * 4 + [True] * 3 + [False] * 4
    touched = position.key_cols.grad.abs().sum(-1) > 0
    assert touched.tolist() == [False] * 3 + [True] * 5 + [False] * 3
