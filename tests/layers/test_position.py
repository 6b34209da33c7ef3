import numpy as np
import pytest
import torch

from relvit.layers import RelativePosition2d
from relvit.ops import RelativeTerms, make_grid, relative_attention


def test_tables_have_one_row_per_clipped_offset():
    terms = RelativePosition2d(8, 2, max_distance=(3, 5))(make_grid(2, 2))
    assert terms.key.rows.shape == terms.value.rows.shape == (7, 8)
    assert terms.key.cols.shape == terms.value.cols.shape == (11, 8)
    per_head = RelativePosition2d(8, 2, max_distance=0, shared_heads=False)(make_grid(2, 2))
    assert per_head.key.rows.shape == (2, 1, 8)


def test_letters_choose_the_terms_and_own_no_other_parameters():
    only_keys = RelativePosition2d(8, 2, rel_terms="k")
    assert only_keys(make_grid(2, 2)).value is None
    assert set(dict(only_keys.named_parameters())) == {"key_rows", "key_cols"} == only_keys.no_weight_decay()
    nothing = RelativePosition2d(8, 2, rel_terms="")
    assert nothing(make_grid(2, 2)) == RelativeTerms()
    assert not list(nothing.parameters())


def test_bias_has_one_number_per_head_and_offset():
    terms = RelativePosition2d(8, 3, rel_terms="qb", max_distance=(2, 4), bucketing="piecewise")(make_grid(2, 2))
    assert terms.bias.rows.shape == (3, 5)
    assert terms.bias.cols.shape == (3, 9)
    assert terms.query.cols.shape == (9, 8)
    assert terms.key is None
    assert terms.bucketing == "piecewise"


def test_joint_layout_has_one_table_over_both_axes():
    terms = RelativePosition2d(8, 3, rel_terms="kb", max_distance=(2, 4), layout="joint")(make_grid(2, 2))
    assert terms.key.table.shape == (5, 9, 8)
    assert terms.bias.table.shape == (3, 5, 9)
    assert terms.query is None
    assert terms.value is None


def test_tables_start_from_a_truncated_normal_or_at_zero():
    torch.manual_seed(0)
    tables = torch.cat(list(RelativePosition2d(64, 1, max_distance=50).parameters()))
    assert abs(float(tables.detach().std()) - 0.02) < 0.001
    assert abs(float(tables.detach().mean())) < 0.001
    assert not any(table.any() for table in RelativePosition2d(8, 1, init_std=0).parameters())


def test_gradients_reach_only_the_offsets_that_occur():
    position = RelativePosition2d(4, 1, max_distance=5)
    q = k = v = torch.randn(1, 1, 6, 4)
    relative_attention(q, k, v, position(make_grid(2, 3)), make_grid(2, 3)).square().sum().backward()
    touched = position.value_rows.grad.abs().sum(-1) > 0
    assert touched.tolist() == [False] * 4 + [True] * 3 + [False] * 4
    touched = position.key_cols.grad.abs().sum(-1) > 0
    assert touched.tolist() == [False] * 3 + [True] * 5 + [False] * 3


def test_it_says_what_it_was_made_with():
    position = RelativePosition2d(8, 2, "kb", (np.int64(2), 3), shared_heads=False, layout="joint", init_std=0.5)
    assert repr(position) == (
        "RelativePosition2d(rel_terms='kb', max_distance=(2, 3), shared_heads=False, layout='joint', "
        "bucketing='clip', init_std=0.5)"
    )


def test_what_pytorch_resets_is_drawn_anew():
    position = RelativePosition2d(8, 2)
    for table in position.parameters():
        torch.nn.init.constant_(table, torch.nan)
    position.reset_parameters()
    assert all(0.01 < table.std() < 0.03 for table in position.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"rel_terms": "kx"},
            ValueError,
            "letters 'q' .query., 'k' .key., 'v' .value., 'b' .bias., each at most once, got 'kx'",
        ),
        ({"rel_terms": "kk"}, ValueError, "got 'kk'"),
        ({"layout": "jont"}, ValueError, "layout must be one of 'separate', 'joint', got 'jont' .did you mean 'joint'"),
        ({"bucketing": "pieces"}, ValueError, "bucketing must be one of 'clip', 'piecewise', got 'pieces'"),
        ({"max_distance": -1}, ValueError, "max_distance must be at least 0, got -1"),
        ({"max_distance": (3, 4, 5)}, ValueError, r"int or \(rows, columns\)"),
        ({"max_distance": (3, 4.0)}, TypeError, "integers"),
        ({"max_distance": 7.5}, TypeError, "max_distance must hold integers, got 7.5"),
        ({"max_distance": (2, True)}, TypeError, "max_distance must hold integers"),
        ({"init_std": -0.1}, ValueError, "init_std must not be negative"),
        ({"shared_heads": "no"}, TypeError, "shared_heads must be True or False, got 'no'"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        RelativePosition2d(8, 2, **arguments)
