"""Wrong arguments raise an error that names them, instead of one of PyTorch's errors or a wrong result."""

import numpy as np
import pytest
import torch
from draws import BACKENDS, draw_case

from relvit.ops import AxisLogits, Channels, JointTable, RelativeTerms, choose, relative_attention, relative_logits

Q, K, V, TERMS, GRID = draw_case(2, 3)


def table(**changes):
    return TERMS._replace(key=TERMS.key._replace(**changes))


def channels(**changes):
    return {
        "terms": TERMS._replace(channels=Channels(torch.ones(2, 2, 6, 3), torch.ones(1, 2, 6, 3))._replace(**changes))
    }


def axis_logits(**changes):
    logits = AxisLogits(torch.ones(2, 2, 6, 2), torch.ones(2, 2, 6, 3))
    return {"terms": TERMS._replace(axis_logits=logits._replace(**changes))}


CONTENTS = [
    ({"key": K[..., :4]}, ValueError, r"key has shape \(2, 2, 6, 4\), expected \(2, 2, N, 5\)"),
    (
        {"key": K[:, :1]},
        ValueError,
        r"key has shape \(2, 1, 6, 5\), and query has 2 heads: .* by repeat_interleave\(2, dim=1",
    ),
    ({"query": Q[0]}, ValueError, r"query has shape \(2, 6, 5\), expected \(B, heads, N, head_dim\)"),
    ({"value": V[:, :1]}, ValueError, r"value has shape \(2, 1, 6, 5\), expected \(2, 2, 6, value_dim\)"),
    ({"value": V.float()}, ValueError, r"value has dtype torch.float32, expected the query's torch.float64"),
    ({"query": Q.long(), "key": K.long(), "value": V.long()}, TypeError, "query has dtype torch.int64, expected a fl"),
    ({"query": Q.numpy()}, TypeError, "query must be a tensor, got ndarray"),
    ({"grid": GRID._replace(prefix=1)}, ValueError, r"that is 6 tokens, expected 7: grid has prefix 1 and 6 patches"),
    ({"query": Q.transpose(1, 2)}, ValueError, r"that is 2 tokens, .*; the shape must be \(B, heads, N, head_dim\)"),
    (
        {"key": K.repeat(1, 1, 2, 1)},
        ValueError,
        "key has .* that is 12 tokens, and query has 6: give key_grid, the Grid",
    ),
    ({"grid": (2, 3)}, TypeError, r"grid must be a Grid, got tuple: make_grid\(height, width\) makes one"),
    ({"key_grid": 6}, TypeError, "key_grid must be a Grid, got int"),
    ({"grid": GRID._replace(coords=[[0, 0]])}, TypeError, "grid.coords must be a tensor, got list"),
    ({"grid": GRID._replace(coords=torch.rand(6, 2))}, TypeError, "grid.coords must hold integers, got dtype torch.f"),
    ({"grid": GRID._replace(valid=torch.ones(6).byte())}, TypeError, "grid.valid must be boolean, got dtype torch.ui"),
    (
        {"grid": GRID._replace(valid=torch.ones(3, 6, dtype=torch.bool))},
        ValueError,
        r"grid.valid has shape \(3, 6\), expected \(6,\) or \(2, 6\)",
    ),
    ({"terms": None}, TypeError, r"terms must be RelativeTerms, got NoneType \(without relative terms: RelativeTerms"),
    ({"terms": RelativeTerms(key=TERMS.key.rows)}, TypeError, "terms.key must be AxisTables or a JointTable, got Ten"),
    ({"terms": TERMS._replace(bucketing="clp")}, ValueError, "terms.bucketing is 'clp'; .*did you mean 'clip'"),
    ({"terms": table(rows=TERMS.key.rows[:4])}, ValueError, "terms.key.rows has 4 rows, expected an odd number"),
    ({"terms": table(rows=np.ones((5, 5)))}, TypeError, "terms.key.rows must be a tensor, got ndarray"),
    ({"terms": table(rows=TERMS.key.rows.long())}, TypeError, "terms.key.rows has dtype torch.int64, expected a floa"),
    ({"terms": table(cols=TERMS.key.cols[:, :3])}, ValueError, r"key.cols has shape \(5, 3\), expected \(2k \+ 1, 5"),
    ({"key": K.to("meta")}, ValueError, "key is on meta, expected the query's device, cpu"),
    ({"terms": table(cols=TERMS.key.cols.to("meta"))}, ValueError, "terms.key.cols is on meta"),
    (
        {"grid": GRID._replace(valid=torch.ones(6, dtype=torch.bool, device="meta"))},
        ValueError,
        "grid.valid is on meta, expected the query's device",
    ),
    (channels(query=torch.ones(2, 2, 5, 3)), ValueError, r"channels.query has shape \(2, 2, 5, 3\), .* \(2, 2, 6, 3\)"),
    (channels(key=torch.ones(1, 2, 6, 2)), ValueError, r"channels.key has shape \(1, 2, 6, 2\), expected \(1, 2, 6, 3"),
    (channels(query=torch.ones(4, 2, 6, 3)), ValueError, "terms.channels.query has shape"),
    (channels(query=torch.ones(2, 2, 6, 3, device="meta")), ValueError, "terms.channels.query is on meta"),
    (channels(query=torch.ones(2, 2, 6, 3).long()), TypeError, "terms.channels.query has dtype torch.int64"),
    ({"terms": RelativeTerms(channels=(Q, K))}, TypeError, "terms.channels must be Channels, got tuple"),
    (axis_logits(rows=torch.ones(2, 2, 6, 3)), ValueError, r"axis_logits.rows has shape .*, expected \(2, 2, 6, 2\)"),
    (axis_logits(cols=torch.ones(1, 2, 6, 3)), ValueError, r"axis_logits.cols has shape .*, expected \(2, 2, 6, 3\)"),
    (axis_logits(cols=torch.ones(2, 2, 6, 3, device="meta")), ValueError, "terms.axis_logits.cols is on meta"),
    (axis_logits(rows=torch.ones(2, 2, 6, 2).long()), TypeError, "terms.axis_logits.rows has dtype torch.int64"),
    ({"terms": RelativeTerms(axis_logits=(Q, K))}, TypeError, "terms.axis_logits must be AxisLogits, got tuple"),
]
OPTIONS = [
    ({"position_query": Q[:1]}, ValueError, r"position_query has shape \(1, 2, 6, 5\), expected \(2, 2, 6, 5\)"),
    ({"position_key": K.float()}, ValueError, "position_key has dtype torch.float32, expected the query's"),
    ({"attn_mask": torch.ones(6, 6, dtype=torch.int64)}, TypeError, "attn_mask has dtype torch.int64, expected bool"),
    ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a tensor, got list"),
    ({"attn_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, r"\(2, 5\), .* prefix tokens included; .* `valid`"),
    ({"attn_mask": torch.ones(1, 2, 2, 6, 6)}, ValueError, "attn_mask has shape"),
    ({"attn_mask": torch.ones(6, 6), "is_causal": True}, ValueError, "exclude each other"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number, got '0.1' of type str"),
    ({"scale": torch.ones(())}, TypeError, "scale must be a number"),
    ({"trained_keys": 1}, ValueError, "trained_keys must be 2 or more, got 1"),
    ({"trained_keys": float("nan")}, ValueError, "trained_keys must be 2 or more, got nan"),
    ({"trained_keys": "196"}, TypeError, "trained_keys must be a number, got '196' of type str"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ({"attn_mask": torch.ones(6, 6, device="meta")}, ValueError, "attn_mask is on meta"),
    (
        {"backend": "fusd"},
        ValueError,
        r"backend is 'fusd'; allowed are 'auto', 'reference', 'fused', 'tiled', 'gathered'.*did you mean 'fused'",
    ),
]


CASES = [(relative_attention, *row) for row in CONTENTS + OPTIONS] + [(choose, *row) for row in CONTENTS]


@pytest.mark.parametrize(("operation", "changes", "error", "message"), CASES)
def test_what_does_not_fit_is_refused_by_name(operation, changes, error, message):
    arguments = {"query": Q, "key": K, "value": V, "terms": TERMS, "grid": GRID} | changes
    with pytest.raises(error, match=message):
        operation(**arguments)


def test_logits_need_a_separable_key_term():
    with pytest.raises(ValueError, match=r"needs terms\.key as AxisTables\(rows, cols\), got NoneType"):
        relative_logits(Q, TERMS._replace(key=None), GRID)
    with pytest.raises(TypeError, match="key_grid must be a Grid, got tuple"):
        relative_logits(Q, TERMS, GRID, (2, 3))
    with pytest.raises(TypeError, match="grid must be a Grid, got tuple"):
        relative_logits(Q, TERMS, (2, 3))
    with pytest.raises(TypeError, match="terms must be RelativeTerms, got NoneType"):
        relative_logits(Q, None, GRID)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_every_shape_that_broadcasts(backend, dtype):
    for shape in [(), (6,), (1, 6), (6, 6), (2, 1, 1, 6), (2, 2, 6, 6)]:
        mask = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4).to(dtype)
        got = relative_attention(Q, K, V, TERMS, GRID, attn_mask=mask, backend=backend)
        full = relative_attention(Q, K, V, TERMS, GRID, attn_mask=mask.expand(2, 2, 6, 6), backend="reference")
        torch.testing.assert_close(got, full, rtol=0, atol=1e-10)


def test_joint_tables_need_a_backend_that_can():
    q, k, v, terms, grid = draw_case(2, 3, which="qk", layout="joint")
    with pytest.raises(ValueError, match=r"terms.query is a joint table: use 'gathered' or 'reference', not 'fused'"):
        relative_attention(q, k, v, terms, grid, backend="fused")
    with pytest.raises(ValueError, match=r"terms\.key as AxisTables\(rows, cols\), got JointTable"):
        relative_logits(q, terms, grid)
    even = terms._replace(key=JointTable(terms.key.table[:, :4]))
    with pytest.raises(ValueError, match=r"terms.key.table has 5 x 4 rows, expected an odd number"):
        relative_attention(q, k, v, even, grid)
    flat = terms._replace(key=JointTable(terms.key.table[0]))
    with pytest.raises(ValueError, match=r"terms.key.table has shape \(5, 5\), expected \(2k \+ 1, 2k \+ 1, 5\)"):
        relative_attention(q, k, v, flat, grid)
