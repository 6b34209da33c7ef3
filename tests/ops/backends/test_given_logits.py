"""Logits that no table gives (free channels, row and column logits): every backend compared with brute force."""

from functools import partial

import pytest
import torch
from draws import BACKENDS, assert_same, brute_force, draw, draw_case, tables_of

from relvit.ops import AxisLogits, Channels, Grid, RelativeTerms, choose, make_grid, num_tokens, relative_attention
from relvit.ops import relative_logits as logits_of_tables
from relvit.ops.terms import add_channels

COORDS = torch.tensor([[[3, 1], [0, 4], [2, 2]], [[0, 0], [3, 3], [1, 4]]])
VALID = torch.tensor([[True, True, False], [False, True, False]])
# The first grid has the queries, the second grid the keys.
GRIDS = {
    "raster": (make_grid(3, 4), make_grid(3, 4)),
    "prefix": (make_grid(2, 3, prefix=2), make_grid(2, 3, prefix=2)),
    "padded": (Grid(4, 5, 1, COORDS, VALID), Grid(4, 5, 1, COORDS, VALID)),
    "pooled": (make_grid(4, 6, prefix=1), make_grid(2, 3, prefix=1)),
    "to padding": (make_grid(2, 3), Grid(4, 5, 1, COORDS, VALID)),
}
# Each pair has the leading dimensions of the queries' and of the keys' channels.
LEADS = [((2, 2), (1, 2)), ((1, 1), (2, 1))]


def case(name, which="", lead=LEADS[0], rank=3, layout="separate"):
    """Draw contents, terms with channels (or with row and column logits if `lead` is None), and the two grids."""
    grid, key_grid = GRIDS[name]
    generator = torch.Generator().manual_seed(1)
    *_, terms, _ = draw_case(2, 3, which=which, per_head="b", layout=layout)
    q = draw(generator, 2, 2, num_tokens(grid), 5)
    k, v = draw(generator, 2, 2, 2, num_tokens(key_grid), 5)
    if lead is None:
        logits = AxisLogits(*(draw(generator, *q.shape[:3], size) for size in key_grid[:2]))
        return q, k, v, terms._replace(axis_logits=logits), grid, key_grid
    channels = (draw(generator, *size, part.shape[2], rank) for size, part in zip(lead, (q, k), strict=True))
    return q, k, v, terms._replace(channels=Channels(*channels)), grid, key_grid


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "which", "lead"),
    [
        *[("raster", "", LEADS[0]), ("prefix", "qkvb", LEADS[1]), ("padded", "kv", LEADS[0]), ("padded", "", LEADS[1])],
        *[("pooled", "", LEADS[0]), ("pooled", "", None), ("pooled", "qkvb", None), ("raster", "kb", None)],
        *[("to padding", "", None), ("to padding", "qv", None)],
    ],
)
def test_equals_brute_force_with_gradients(name, which, lead, backend, several_tiles):
    q, k, v, terms, *grids = case(name, which, lead)
    leaves = [t.requires_grad_() for t in (q, k, v, *(terms.channels or terms.axis_logits), *tables_of(terms))]
    got = relative_attention(q, k, v, terms, *grids, backend=backend)
    assert_same(got, brute_force(q, k, v, terms, *grids), leaves, atol=1e-11)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("lead", [LEADS[0], None])
def test_beside_a_joint_table(backend, lead):
    q, k, v, terms, *grids = case("prefix", "b", lead, layout="joint")
    got = relative_attention(q, k, v, terms, *grids, backend=backend)
    torch.testing.assert_close(got, brute_force(q, k, v, terms, *grids), rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_mask_temperature_and_padding_that_holds_nan(backend):
    q, k, v, terms, grid, _ = case("padded", "k")
    spoilt = terms.channels.key.expand(2, -1, -1, -1).clone()
    expected = brute_force(q, k, v, terms, grid, scale=7e3)
    spoilt[0, :, 3], spoilt[1, :, 1], spoilt[1, :, 3] = torch.nan, torch.nan, torch.nan
    spoilt = terms._replace(channels=terms.channels._replace(key=spoilt))
    got = relative_attention(q, k, v, spoilt, grid, scale=7e3, backend=backend)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    # The temperature also multiplies the logits of channels. In this test no token is padding.
    q, k, v, terms, grid, _ = case("raster", "k")
    factor = torch.tensor(12.0, dtype=torch.float64).log() / torch.tensor(5.0, dtype=torch.float64).log()
    hotter = terms._replace(channels=terms.channels._replace(query=terms.channels.query * factor))
    expected = brute_force(q, k, v, hotter, grid, scale=float(factor) * 5**-0.5)
    got = relative_attention(q, k, v, terms, grid, trained_keys=5, backend=backend)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("options", [{}, {"scale": 7e3}, {"trained_keys": 5}])
def test_row_and_column_logits_stand_for_the_key_term(backend, options):
    q, k, v, terms, grid = draw_case(3, 4, prefix=2, which="k")
    given = RelativeTerms(axis_logits=AxisLogits(*logits_of_tables(q, terms, grid)))
    expected = relative_attention(q, k, v, terms, grid, backend="reference", **options)
    got = relative_attention(q, k, v, given, grid, backend=backend, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9 if "scale" in options else 1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_and_column_logits_in_half_precision(backend):
    q, k, v, terms, *grids = case("pooled", lead=None)
    expected = relative_attention(q, k, v, terms, *grids, backend="reference")
    half = terms._replace(axis_logits=AxisLogits(*(part.float() for part in terms.axis_logits)))
    got = relative_attention(*(part.bfloat16() for part in (q, k, v)), half, *grids, backend=backend)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("given", "tokens"), [(torch.float32, 33), (torch.bfloat16, 16)])
@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
def test_channels_in_half_precision_where_large_products_cancel(backend, given, tokens, dtype):
    """The logits -(y - v)^2 / 2 are sums of products with y^2, y v and v^2, which are up to 1,000 and cancel."""
    q, k, v = draw(torch.Generator().manual_seed(1), 3, 2, 2, tokens, 5).to(dtype)
    y = torch.arange(float(tokens))
    query = torch.stack((-y * y / 2, y, torch.full_like(y, -0.5)), dim=-1)[None, None]
    key = torch.stack((torch.ones_like(y), y, y * y), dim=-1)[None, None]
    # Squares of numbers up to 15 are exact in bfloat16.
    terms = RelativeTerms(channels=Channels(query.to(given), key.to(given)))
    # The queries' channels are divided by the scale; 0.3 is not a power of two, so the division rounds.
    got = relative_attention(q, k, v, terms, make_grid(tokens, 1), scale=0.3, backend=backend)
    assert got.dtype == dtype
    distance = (y[:, None] - y).double()
    logits = 0.3 * q.double() @ k.double().mT - distance**2 / 2
    expected = logits.softmax(-1) @ v.double()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e-4])
def test_channels_beyond_the_range_of_float16(size, padded):
    """Channels divided by the scale are as large as 10^6, and their products with the keys' are not."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = draw(generator, 3, 2, 2, 12, 5).half()
    query, key = draw(generator, 1, 1, 12, 3).float() * size, draw(generator, 2, 1, 12, 3).float() / size
    query[..., 2] = 0
    valid = torch.ones(2, 12, dtype=torch.bool)
    if padded:
        valid[0, 8:], key[0, :, 8:], key[0, :, 9] = False, 1e30, torch.nan
    terms, grid = RelativeTerms(channels=Channels(query, key)), make_grid(3, 4, valid=valid if padded else None)
    attend = partial(relative_attention, grid=grid, scale=0.01)
    got = attend(q, k, v, terms, backend="fused")
    precise = RelativeTerms(channels=Channels(query.double(), key.double()))
    expected = attend(q.double(), k.double(), v.double(), precise, backend="reference")
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-3)
    nothing = RelativeTerms(channels=Channels(query[:0], key[:0]))
    assert relative_attention(q[:0], k[:0], v[:0], nothing, make_grid(3, 4), backend="fused").shape == (0, 2, 12, 5)


def test_several_channels_and_their_width():
    q, k, v, terms, grid, _ = case("raster")
    both = add_channels(terms, case("raster", lead=LEADS[1], rank=2)[3].channels)
    assert both.channels.query.shape[-1] == 5
    expected = brute_force(q, k, v, both, grid)
    torch.testing.assert_close(relative_attention(q, k, v, both, grid), expected, rtol=0, atol=1e-11)
    assert choose(q, k, v, terms, grid).backend == "fused"
    wide = Channels(*(torch.empty(1, 1, 12, 300, device="meta") for _ in range(2)))
    tables = case("raster", "k")[3].key
    terms = RelativeTerms(key=type(tables)(*(table.to("meta") for table in tables)), channels=wide)
    q, k, v = (part.to("meta", torch.float32) for part in (q, k, v))
    assert choose(q, k, v, terms, grid).reason == "fused GPU kernels end at width 256"


def test_the_choice_beside_row_and_column_logits_and_what_has_no_kernel(monkeypatch):
    q, k, v, terms, *grids = case("pooled", lead=None)
    assert choose(q, k, v, terms, *grids).backend == "tiled"
    assert choose(q, k, v, RelativeTerms(), *grids).backend == "fused"
    terms.axis_logits.cols.requires_grad_()
    for trained in (terms, RelativeTerms(query_bias=torch.ones(2, 5, requires_grad=True))):
        assert "no gradient" not in choose(q, k, v, trained, *grids).keeps
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"takes no logits that are .* \(terms\.axis_logits\): use 'fused'"):
        relative_attention(q.float(), k.float(), v.float(), terms, *grids, backend="triton")
