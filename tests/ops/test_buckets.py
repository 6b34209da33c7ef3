"""Rows of tables by offset, clipped and piecewise, compared with the papers' formulas."""

from functools import partial

import pytest
import torch
from oracles.relative_attention import row_of

from relvit.ops.buckets import bucket, saturation


@pytest.mark.parametrize("bucketing", ["clip", "piecewise"])
@pytest.mark.parametrize("distance", [0, 1, 2, 5, 7, 16])
def test_every_offset_against_the_formula(bucketing, distance):
    offsets = torch.arange(-80, 81)
    rows = bucket(offsets, distance, bucketing)
    assert rows.tolist() == [row_of(int(offset), distance, bucketing) for offset in offsets]
    # The row is an odd function of the offset, within the table, and constant for large offsets.
    assert torch.equal(rows - distance, -(rows.flip(0) - distance))
    far = offsets >= max(1, saturation(distance, bucketing))
    assert rows[far].unique().tolist() == [2 * distance]


def test_piecewise_reaches_further_with_the_same_rows():
    near, far = bucket(torch.tensor([3, 4]), 8, "piecewise"), bucket(torch.tensor([9, 30]), 8, "piecewise")
    assert near.tolist() == [11, 12]  # Offsets up to alpha = 4 have a row each.
    # The rows are rounded: 4 + 4 ln(9/4)/ln(8) = 5.56 and 4 + 4 ln(30/4)/ln(8) = 7.88.
    assert far.tolist() == [8 + 6, 8 + 8]


def test_an_unknown_bucketing_is_refused():
    for function in (partial(bucket, torch.tensor(3)), saturation):
        with pytest.raises(ValueError, match=r"bucketing is 'clpi'; allowed are .*did you mean 'clip'"):
            function(2, "clpi")
