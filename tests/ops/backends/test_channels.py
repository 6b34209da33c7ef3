"""Free channels: every backend against brute force, pair by pair, with gradients; half precision where terms cancel."""

import pytest
import torch
from draws import BACKENDS, all_places, assert_same, brute_force, draw, draw_case, tables_of

from relvit.ops import Channels, Grid, RelativeTerms, choose, make_grid, num_tokens, relative_attention
from relvit.ops.terms import add_channels

COORDS = torch.tensor([[[3, 1], [0, 4], [2, 2]], [[0, 0], [3, 3], [1, 4]]])
VALID = torch.tensor([[True, True, False], [False, True, False]])
LAYOUTS = {
    "raster": make_grid(3, 4),
    "prefix": make_grid(2, 3, prefix=2),
    "padded": Grid(4, 5, 1, COORDS, VALID),
}
# Shapes of the channels' leading dimensions, of queries and keys.
LEADS = [((2, 2), (1, 2)), ((1, 1), (2, 1))]


def case(grid, which="", lead=LEADS[0], rank=3, joint=False):
    generator = torch.Generator().manual_seed(1)
    *_, terms, _ = draw_case(2, 3, which=which, per_head="b", layout="joint" if joint else "separate")
    tokens = num_tokens(grid)
    q, k, v = draw(generator, 3, 2, 2, tokens, 5)
    return q, k, v, terms._replace(channels=Channels(*(draw(generator, *size, tokens, rank) for size in lead)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "which", "lead"),
    [("raster", "", LEADS[0]), ("prefix", "qkvb", LEADS[1]), ("padded", "kv", LEADS[0]), ("padded", "", LEADS[1])],
)
def test_equals_brute_force_with_gradients(name, which, lead, backend, several_tiles):
    grid = LAYOUTS[name]
    q, k, v, terms = case(grid, which, lead)
    leaves = [t.requires_grad_() for t in (q, k, v, *terms.channels, *tables_of(terms))]
    got = relative_attention(q, k, v, terms, grid, backend=backend)
    assert_same(got, brute_force(q, k, v, terms, grid), leaves, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_mask_temperature_and_padding_that_holds_nan(backend):
    grid = LAYOUTS["padded"]
    q, k, v, terms = case(grid, "k")
    spoilt = terms.channels.key.expand(2, -1, -1, -1).clone()
    expected = brute_force(q, k, v, terms, grid, scale=7e3)
    spoilt[0, :, 3], spoilt[1, :, 1], spoilt[1, :, 3] = torch.nan, torch.nan, torch.nan
    spoilt = terms._replace(channels=terms.channels._replace(key=spoilt))
    got = relative_attention(q, k, v, spoilt, grid, scale=7e3, backend=backend)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    # With the temperature the channels are multiplied as all logits are; without padding in a mask.
    grid = LAYOUTS["raster"]
    q, k, v, terms = case(grid, "k")
    factor = torch.tensor(12.0, dtype=torch.float64).log() / torch.tensor(5.0, dtype=torch.float64).log()
    hotter = terms._replace(channels=terms.channels._replace(query=terms.channels.query * factor))
    expected = brute_force(q, k, v, hotter, grid, scale=float(factor) * 5**-0.5)
    got = relative_attention(q, k, v, terms, grid, trained_keys=5, backend=backend)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "gathered", "auto"])
def test_beside_a_joint_table(backend):
    grid = LAYOUTS["prefix"]
    q, k, v, terms = case(grid, "b", joint=True)
    got = relative_attention(q, k, v, terms, grid, backend=backend)
    torch.testing.assert_close(got, brute_force(q, k, v, terms, grid), rtol=0, atol=1e-11)


def test_keys_of_another_grid():
    grid, key_grid = make_grid(2, 3, prefix=1), make_grid(4, 2)
    q, _, _, _ = case(grid)
    _, k, v, _ = case(key_grid)
    channels = Channels(case(grid)[3].channels.query, case(key_grid)[3].channels.key)
    terms = RelativeTerms(channels=channels)
    expected = brute_force(q, k, v, terms, grid, key_places=all_places(key_grid, 2))
    for backend in ("auto", *BACKENDS):
        got = relative_attention(q, k, v, terms, grid, key_grid, backend=backend)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
def test_half_precision_where_large_products_cancel(backend, dtype):
    """-(y - v)^2 / 2 from y^2, y v and v^2 of up to 1,000."""
    grid = make_grid(33, 1)
    q, k, v, _ = case(grid)
    q, k, v = (part.to(dtype) for part in (q, k, v))
    y = torch.arange(33.0)
    query = torch.stack((-y * y / 2, y, torch.full_like(y, -0.5)), dim=-1)[None, None]
    key = torch.stack((torch.ones_like(y), y, y * y), dim=-1)[None, None]
    terms = RelativeTerms(channels=Channels(query, key))
    # One that is no power of two, by which queries are divided.
    got = relative_attention(q, k, v, terms, grid, scale=0.3, backend=backend)
    assert got.dtype == dtype
    distance = (y[:, None] - y).double()
    logits = 0.3 * q.double() @ k.double().mT - distance**2 / 2
    expected = logits.softmax(-1) @ v.double()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.02)


def test_several_channels_and_their_width():
    grid = make_grid(2, 3)
    q, k, v, terms = case(grid, lead=LEADS[0])
    further = case(grid, lead=LEADS[1], rank=2)[3].channels
    both = add_channels(terms, further)
    assert both.channels.query.shape[-1] == 5
    expected = brute_force(q, k, v, both, grid)
    torch.testing.assert_close(relative_attention(q, k, v, both, grid), expected, rtol=0, atol=1e-11)
    assert choose(q, k, v, terms, grid).backend == "fused"
    wide = Channels(*(part.expand(-1, -1, -1, 1).expand(-1, -1, -1, 300) for part in case(grid, rank=1)[3].channels))
    q, k, v = (part.to("meta", torch.float32) for part in (q, k, v))
    *_, tables = case(grid, "k")
    tables = tables._replace(
        key=type(tables.key)(*(t.to("meta") for t in tables.key)), channels=Channels(*(w.to("meta") for w in wide))
    )
    assert choose(q, k, v, tables, Grid(2, 3)).reason == "fused GPU kernels end at width 256"
