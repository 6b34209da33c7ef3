"""Pure functions on tensors: the exact relative attention, its inputs, and its slow reference."""

from relvit.ops.attention import Choice, choose, relative_attention, relative_logits
from relvit.ops.buckets import BUCKETINGS
from relvit.ops.grid import Grid, key_mask, make_grid, num_tokens, patch_coords
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms

__all__ = [
    "Grid",
    "make_grid",
    "num_tokens",
    "patch_coords",
    "key_mask",
    "AxisTables",
    "JointTable",
    "BUCKETINGS",
    "RelativeTerms",
    "relative_attention",
    "relative_logits",
    "Choice",
    "choose",
]
