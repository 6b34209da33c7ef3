"""Errors of positions' constructors name the argument and the allowed values."""

import pytest

from relvit.families.transformer_xl import TransformerXLPosition2d
from relvit.layers import (
    AxialPositionEmbedding,
    ContinuousPosition2d,
    LookHerePosition2d,
    LowRankPosition2d,
    ParabolicPosition2d,
    RelativePosition2d,
    RotaryEmbedding2d,
    SlopePosition2d,
)

GRID = {"grid_size": (5, 9)}
REFUSED = [
    (RelativePosition2d, {"rel_terms": "kx"}, "rel_terms .*'q' .query., .*'b' .bias., each at most once, got 'kx'"),
    (RelativePosition2d, {"rel_terms": "kk"}, "rel_terms .* got 'kk'"),
    (RelativePosition2d, {"rel_terms": 5}, "rel_terms must be a string of letters such as 'kv', got int"),
    (RelativePosition2d, {"init_std": -0.1}, "init_std must not be negative, got -0.1"),
    (RelativePosition2d, {"layout": "jont"}, "layout .*'separate', 'joint' .did you mean 'joint'"),
    (RelativePosition2d, {"bucketing": "pieces"}, "bucketing .*'clip', 'piecewise'"),
    (RelativePosition2d, {"max_distance": -1}, "max_distance .*at least 0, got -1"),
    (RelativePosition2d, {"max_distance": (3, 4, 5)}, r"max_distance .*int or \(rows, columns\)"),
    (RelativePosition2d, {"max_distance": (2, True)}, "max_distance must hold integers"),
    (RelativePosition2d, {"shared_heads": "no"}, "shared_heads .*True or False, got 'no'"),
    (SlopePosition2d, {"num_heads": 0}, "num_heads .*at least 1, got 0"),
    (SlopePosition2d, {"distance": "euclid"}, "distance .*'manhattan', 'euclidean'"),
    (SlopePosition2d, {"max_distance": (1, 2.0)}, "max_distance must hold integers"),
    (TransformerXLPosition2d, {"max_distance": -1}, "max_distance .*at least 0, got -1"),
    (ContinuousPosition2d, {"mode": "swim"}, "mode .*'cr', 'swin'.*did you mean 'swin'"),
    (ContinuousPosition2d, {"window": 1}, "window .*at least 2, got 1"),
    (ParabolicPosition2d, {"parabolas": "50"}, "parabolas must be an integer, got '50'"),
    (ParabolicPosition2d, {"parabolas": 0}, "parabolas .*at least 1, got 0"),
    (LowRankPosition2d, {"rank": 0}, "rank .*at least 1, got 0"),
    (LowRankPosition2d, {"rank": 2.5}, "rank must be an integer, got 2.5"),
    (LowRankPosition2d, {"grid_size": 0}, "grid_size .*at least 1, got 0"),
    (LookHerePosition2d, {"num_heads": 3}, "num_heads must be at least 4 .*got 3: .* num_heads=4, or .* relvit_small"),
    (
        LookHerePosition2d,
        {"num_heads": 6, "view": 45},
        "num_heads must be at least 12 .*got 6: .* num_heads=12, or .* relvit_base",
    ),
    (LookHerePosition2d, {"num_heads": 4, "view": 60}, "view must be one of .*180.*got 60"),
    (LookHerePosition2d, {"num_heads": 4, "layer": (3, 3)}, r"layer must be .*got \(3, 3\)"),
    (RotaryEmbedding2d, {"head_dim": 6}, "head_dim .*multiple of 4, got 6"),
    (RotaryEmbedding2d, {"kind": "axal"}, "kind .*'axial', 'mixed'.*did you mean 'axial'"),
    (RotaryEmbedding2d, {"temperature": 0}, "temperature .*positive, got 0"),
    (AxialPositionEmbedding, {**GRID, "combine": "concatenate"}, "combine .*'concat', 'sum' .did you mean 'concat'"),
    (AxialPositionEmbedding, {"grid_size": (0, 3)}, "grid_size .*at least 1"),
    (AxialPositionEmbedding, {"grid_size": 2.5}, "grid_size must hold integers, got 2.5"),
    (AxialPositionEmbedding, {**GRID, "widths": (2, 3)}, r"widths .*add up to dim 8, got \(2, 3\), which is 5"),
    (
        AxialPositionEmbedding,
        {**GRID, "widths": (4, 4), "combine": "sum"},
        r"widths .*'concat', got widths=\(4, 4\) .*: leave widths out",
    ),
]
WRONG_TYPE = ("hold integers", "be an integer", "True or False", "got int")


@pytest.mark.parametrize(("position", "given", "message"), REFUSED, ids=[str(row[1]) for row in REFUSED])
def test_errors_name_the_argument_and_what_is_allowed(position, given, message):
    sizes = {"dim": 8} if position is AxialPositionEmbedding else {"head_dim": 8, "num_heads": 2}
    error = TypeError if any(part in message for part in WRONG_TYPE) else ValueError
    with pytest.raises(error, match=message):
        position(**{**sizes, **given})
