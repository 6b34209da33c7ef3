"""Pure functions on tensors: exact relative attention, its inputs, and slow references."""

from relvit.ops.attention import Choice, choose, relative_attention, relative_logits
from relvit.ops.buckets import BUCKETINGS, bucket, saturation
from relvit.ops.grid import Grid, grid_from_naflex, key_mask, make_grid, num_tokens, patch_coords
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisLogits, AxisTables, Channels, JointTable, RelativeTerms
from relvit.ops.windows import from_windows, to_windows

__all__ = [
    "Grid",
    "make_grid",
    "grid_from_naflex",
    "num_tokens",
    "patch_coords",
    "key_mask",
    "to_windows",
    "from_windows",
    "AxisLogits",
    "AxisTables",
    "JointTable",
    "Channels",
    "BUCKETINGS",
    "bucket",
    "saturation",
    "RelativeTerms",
    "relative_attention",
    "relative_logits",
    "AttentionInputs",
    "Choice",
    "choose",
]
