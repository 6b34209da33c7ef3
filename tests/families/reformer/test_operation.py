"""LSH attention compared with its definition in float64, and with full attention if all tokens are in one bucket."""

import pytest
import torch
import torch.nn.functional as F
from draws import assert_same

from relvit.families.reformer import lsh_attention, lsh_rotations, reference
from relvit.ops import AxisLogits, AxisTables, JointTable, RelativeTerms, make_grid
from relvit.ops.reference.attention import pair_bias


def inputs(grid, batch=2, heads=3, head_dim=8, value_dim=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    patches = grid.height * grid.width if grid.coords is None else grid.coords.shape[-2]
    shape = (batch, heads, grid.prefix + patches)
    return [torch.randn(*shape, dim, generator=generator, dtype=dtype) for dim in (head_dim, value_dim)]


def rotations(rounds, buckets, head_dim=8):
    return lsh_rotations(rounds, head_dim, buckets, torch.Generator().manual_seed(1)).double()


def tables(rows=5, cols=3, heads=3, joint=False):
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return RelativeTerms(
        bias=JointTable(draw(heads, rows, cols)) if joint else AxisTables(draw(heads, rows), draw(cols))
    )


def padded(height, width, prefix=0):
    patches = height * width
    coords = torch.stack([torch.randperm(patches, generator=torch.Generator().manual_seed(i)) for i in (3, 4)])
    coords = torch.stack((coords // width, coords % width), dim=-1)
    valid = torch.ones(2, patches, dtype=torch.bool)
    valid[0, -3:] = False
    valid[1, ::4] = False
    return make_grid(height, width, prefix, coords, valid)


GRIDS = {
    "raster": make_grid(5, 7),
    "prefix": make_grid(4, 6, prefix=3),
    "padded": padded(5, 4),
    "padded, prefix": padded(3, 7, prefix=2),
    "one row": make_grid(1, 9),
    "one token": make_grid(1, 1),
}


@pytest.mark.parametrize(
    ("buckets", "chunk", "rounds", "joint", "bucketing", "is_causal"),
    [
        (1, None, 1, False, "piecewise", False),
        (4, None, 3, True, "clip", False),
        (8, 3, 3, False, "clip", True),
        (2, 1, 1, True, "piecewise", True),
        (4, 3, 2, False, "piecewise", False),
    ],
)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_the_definition(grid, rounds, joint, bucketing, buckets, chunk, is_causal):
    terms = tables(joint=joint)._replace(bucketing=bucketing)
    given = [x.requires_grad_() for x in (*inputs(grid), *terms.bias)]
    options = {"terms": terms, "chunk_size": chunk, "is_causal": is_causal, "scale": 0.7}
    got, expected = (
        operation(*given[:2], grid, rotations(rounds, buckets), **options)
        for operation in (lsh_attention, reference.lsh_attention)
    )
    assert_same(got, expected, given, atol=1e-10)


def full_attention(query_key, value, grid, terms):
    """Compute attention to all other tokens, whose keys are the normalised queries."""
    logits = query_key @ F.normalize(query_key, dim=-1).transpose(-1, -2)
    logits = logits + pair_bias(terms, grid, grid, query_key)
    logits = logits.masked_fill(torch.eye(logits.shape[-1], dtype=torch.bool), -torch.inf)
    return logits.softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("rounds", "buckets", "chunk"), [(1, 1, None), (4, 1, None), (60, 2, 100)], ids=["one", "again", "covering"]
)
def test_one_bucket_or_covering_rounds_are_full_attention_and_pairs_count_once(rounds, buckets, chunk):
    grid = make_grid(4, 6, prefix=1)
    out = lsh_attention(*inputs(grid), grid, rotations(rounds, buckets), chunk_size=chunk, terms=tables())
    torch.testing.assert_close(out, full_attention(*inputs(grid), grid, tables()), rtol=0, atol=1e-10)


def test_padding_changes_nothing_and_may_hold_anything():
    alone, coords = make_grid(3, 5), torch.cartesian_prod(torch.arange(3), torch.arange(5))
    batch = make_grid(3, 5, coords=F.pad(coords, (0, 0, 0, 6)), valid=torch.arange(21) < 15)
    query_key, value = inputs(alone)
    expected = lsh_attention(query_key, value, alone, rotations(2, 4), chunk_size=4, terms=tables())
    padded_inputs = [F.pad(x, (0, 0, 0, 6), value=torch.nan).requires_grad_() for x in (query_key, value)]
    out = lsh_attention(*padded_inputs, batch, rotations(2, 4), chunk_size=4, terms=tables())
    torch.testing.assert_close(out[:, :, :15], expected, rtol=0, atol=1e-12)
    assert (out[:, :, 15:] == 0).all()
    for gradient in torch.autograd.grad(out.sum(), padded_inputs):
        assert gradient.isfinite().all()
        assert (gradient[:, :, 15:] == 0).all()


def test_the_generator_decides():
    one, again = (lsh_rotations(2, 8, 6, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, again)
    assert one.shape == (2, 8, 3)
    assert not torch.equal(one, lsh_rotations(2, 8, 6, torch.Generator().manual_seed(6)))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
def test_low_precision(dtype, atol):
    grid = GRIDS["padded, prefix"]
    query_key, value = (x.to(dtype) for x in inputs(grid))
    out = lsh_attention(query_key, value, grid, rotations(3, 4).float(), terms=tables())
    assert out.dtype == dtype
    # The reference hashes the same rounded vectors, so it gets the same buckets.
    expected = reference.lsh_attention(
        query_key.double(), value.double(), grid, rotations(3, 4).float().double(), terms=tables()
    )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol * expected.abs().max().item())


def test_autocast_keeps_the_buckets():
    grid = make_grid(24, 24)
    query_key, value = (x.to(torch.bfloat16) for x in inputs(grid))
    expected = lsh_attention(query_key, value, grid, rotations(1, 128).float())
    with torch.autocast("cpu", torch.bfloat16):
        out = lsh_attention(query_key, value, grid, rotations(1, 128).float())
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert lsh_attention(query_key.float(), value.float(), grid, rotations(1, 128).float()).dtype == torch.float32


@pytest.mark.parametrize("joint", [False, True])
def test_the_gradient_of_a_bfloat16_table_is_summed_without_rounding(joint):
    grid = make_grid(12, 10)
    query_key, value = (x.bfloat16() for x in inputs(grid))
    given, gradients = tables(joint=joint).bias, []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [table.bfloat16().to(dtype).requires_grad_() for table in given]
        terms = RelativeTerms(bias=type(given)(*leaves))
        out = lsh_attention(query_key.to(dtype), value.to(dtype), grid, rotations(2, 4).float(), terms=terms)
        found = torch.autograd.grad((out * value.sigmoid().to(dtype)).sum(), leaves)
        gradients.append(torch.cat([part.double().flatten() for part in found]))
    found, expected = gradients
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"terms": RelativeTerms(key=AxisTables(torch.zeros(3, 8), torch.zeros(3, 8)))}, ValueError, "a bias alone"),
        ({"terms": RelativeTerms(axis_logits=AxisLogits(*torch.zeros(2, 2, 3, 35, 5)))}, ValueError, "axis_logits"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
        ({"rotations": torch.zeros(1, 7, 2)}, ValueError, r"rotations has shape \(1, 7, 2\)"),
        ({"rotations": torch.zeros(0, 8, 2)}, ValueError, "must have 1 round or more"),
        ({"value": torch.zeros(2, 3, 35, 5)}, ValueError, "dtype"),
        ({"grid": make_grid(5, 6)}, ValueError, "35 tokens, expected 30"),
    ],
)
def test_refused(change, error, message):
    query_key, value = inputs(GRIDS["raster"])
    arguments = {"query_key": query_key, "value": value, "grid": GRIDS["raster"], "rotations": rotations(1, 2)}
    with pytest.raises(error, match=message):
        lsh_attention(**{**arguments, **change})


@pytest.mark.parametrize(("rounds", "buckets", "message"), [(0, 2, "rounds"), (1, 3, "buckets"), (1, 0, "buckets")])
def test_rotations_refused(rounds, buckets, message):
    with pytest.raises(ValueError, match=message):
        lsh_rotations(rounds, 8, buckets)
