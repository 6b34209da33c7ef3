"""Row and column logits that are computed already: every backend against brute force, and against the key term."""

import pytest
import torch
from draws import BACKENDS, all_places, assert_same, brute_force, draw, draw_case, tables_of

from relvit.ops import AxisLogits, Grid, RelativeTerms, choose, make_grid, num_tokens, relative_attention
from relvit.ops import relative_logits as logits_of_tables

COORDS = torch.tensor([[[3, 1], [0, 4], [2, 2]], [[0, 0], [3, 3], [1, 4]]])
VALID = torch.tensor([[True, True, False], [False, True, False]])
# Grids of queries and of keys.
LAYOUTS = {
    "pooled": (make_grid(4, 6, prefix=1), make_grid(2, 3, prefix=1)),
    "unpooled": (make_grid(3, 2), make_grid(3, 2)),
    "padded": (make_grid(2, 3), Grid(4, 5, 1, COORDS, VALID)),
}


def case(name, which=""):
    grid, key_grid = LAYOUTS[name]
    generator = torch.Generator().manual_seed(1)
    *_, terms, _ = draw_case(2, 3, which=which, per_head="b")
    q = draw(generator, 2, 2, num_tokens(grid), 5)
    k, v = draw(generator, 2, 2, 2, num_tokens(key_grid), 5)
    logits = AxisLogits(*(draw(generator, *q.shape[:3], size) for size in key_grid[:2]))
    return q, k, v, terms._replace(axis_logits=logits), grid, key_grid


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("which", ["", "kb", "qv"])
def test_equals_brute_force_with_gradients(name, which, backend, several_tiles):
    q, k, v, terms, grid, key_grid = case(name, which)
    leaves = [t.requires_grad_() for t in (q, k, v, *terms.axis_logits, *tables_of(terms))]
    options = {"key_places": all_places(key_grid, 2)}
    if key_grid.valid is not None:
        options["valid"] = [[True, *row] for row in key_grid.valid.tolist()]
    expected = brute_force(q, k, v, terms, grid, **options)
    got = relative_attention(q, k, v, terms, grid, key_grid, backend=backend)
    assert_same(got, expected, leaves, atol=1e-11)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("options", [{}, {"scale": 7e3}, {"trained_keys": 5}])
def test_they_stand_for_the_key_term(backend, options):
    q, k, v, terms, grid = draw_case(3, 4, prefix=2, which="k")
    given = RelativeTerms(axis_logits=AxisLogits(*logits_of_tables(q, terms, grid)))
    expected = relative_attention(q, k, v, terms, grid, backend="reference", **options)
    got = relative_attention(q, k, v, given, grid, backend=backend, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9 if "scale" in options else 1e-11)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_beside_a_joint_bias(backend):
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which="b", layout="joint")
    logits = AxisLogits(*logits_of_tables(q, draw_case(3, 4, which="k")[3], grid))
    terms = terms._replace(axis_logits=logits)
    got = relative_attention(q, k, v, terms, grid, backend=backend)
    torch.testing.assert_close(got, brute_force(q, k, v, terms, grid), rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend):
    q, k, v, terms, grid, key_grid = case("pooled")
    expected = relative_attention(q, k, v, terms, grid, key_grid, backend="reference")
    half = terms._replace(axis_logits=AxisLogits(*(part.float() for part in terms.axis_logits)))
    got = relative_attention(*(part.bfloat16() for part in (q, k, v)), half, grid, key_grid, backend=backend)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.05)


def test_the_choice_and_what_has_no_kernel(monkeypatch):
    q, k, v, terms, grid, key_grid = case("pooled")
    assert choose(q, k, v, terms, grid, key_grid).backend == "tiled"
    assert choose(q, k, v, RelativeTerms(), grid, key_grid).backend == "fused"
    terms.axis_logits.cols.requires_grad_()
    assert "no gradient" not in choose(q, k, v, terms, grid, key_grid).keeps
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"takes none \(terms\.axis_logits\): use 'fused'"):
        relative_attention(q.float(), k.float(), v.float(), terms, grid, key_grid, backend="triton")
