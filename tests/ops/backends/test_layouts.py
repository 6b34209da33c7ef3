"""Tokens that do not fill the raster: NaFlex batches, and what padding, dropping and permuting must not change."""

from typing import NamedTuple

import pytest
import torch
from draws import BACKENDS, assert_all_close, draw, draw_terms, gradients, tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify

from relvit.ops import RelativeTerms, grid_from_naflex, make_grid, num_tokens, relative_attention

pytestmark = pytest.mark.usefixtures("several_tiles")

PATCH = 4
BATCH, HEADS, DIM = 2, 2, 5
# Large enough to swamp everything if it came through.
GARBAGE = 1e5


def cut_by_hand(image):
    """(3, height, width) -> (P, 3 PATCH^2), patch after patch in raster order, channels last."""
    _, height, width = image.shape
    return torch.stack(
        [
            image[:, y : y + PATCH, x : x + PATCH].permute(1, 2, 0).flatten()
            for y in range(0, height, PATCH)
            for x in range(0, width, PATCH)
        ]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_naflex_batch_equals_its_images_one_by_one(backend):
    prefix, generator = 2, torch.Generator().manual_seed(0)
    sizes = [(2, 5), (4, 3), (3, 1)]
    photos = [torch.rand(3, PATCH * h, PATCH * w, generator=generator) for h, w in sizes]
    batch, _ = NaFlexCollator(max_seq_len=13)([(Patchify(PATCH)(photo), 0) for photo in photos])
    patches, coord, valid = batch["patches"].double(), batch["patch_coord"], batch["patch_valid"]
    # timm pads with zeros, other loaders may not.
    patches = torch.where(valid[..., None], patches, GARBAGE)
    coord = torch.where(valid[..., None], coord, torch.tensor([-7, 1000]))
    grid = grid_from_naflex(coord, valid, 4, 6, prefix)

    project, first = draw(generator, 3, patches.shape[-1], HEADS * DIM), draw(generator, 3, prefix, HEADS * DIM)
    terms = draw_terms(generator, "qkvb", (2, 3), DIM, HEADS)

    def tokens_of(patches):  # (B, P, C) -> queries, keys, values, (3, B, HEADS, prefix + P, DIM)
        placed = torch.einsum("bpc,tcd->tbpd", patches, project)
        placeless = first[:, None].expand(-1, patches.shape[0], -1, -1)
        return torch.cat((placeless, placed), dim=2).unflatten(-1, (HEADS, DIM)).transpose(2, 3)

    qkv = tokens_of(patches).requires_grad_()
    inputs = [qkv, *(table.requires_grad_() for table in tables_of(terms))]
    out = relative_attention(*qkv, terms, grid, backend=backend)
    cotangent = draw(generator, *out.shape)
    real = torch.cat((torch.ones(3, prefix, dtype=torch.bool), valid), dim=1)[:, None, :, None]
    got = gradients(out, inputs, torch.where(real, cotangent, 0.0))

    summed = [torch.zeros_like(table) for table in inputs[1:]]
    for sample, (photo, (h, w)) in enumerate(zip(photos, sizes, strict=True)):
        alone = tokens_of(cut_by_hand(photo.double())[None]).requires_grad_()
        count = alone.shape[3]
        expected = relative_attention(*alone, terms, make_grid(h, w, prefix), backend=backend)
        torch.testing.assert_close(out[sample, :, :count], expected[0], rtol=0, atol=1e-12)
        grads = gradients(expected, [alone, *inputs[1:]], cotangent[sample : sample + 1, :, :count])
        torch.testing.assert_close(got[0][:, sample, :, :count], grads[0][:, 0], rtol=0, atol=1e-12)
        assert not got[0][:, sample, :, count:].any()
        summed = [total + grad for total, grad in zip(summed, grads[1:], strict=True)]
    assert_all_close(got[1:], summed, atol=1e-12)


def test_all_naflex_patches_may_be_real():
    coord = torch.tensor([[[0, 0], [1, 3]], [[2, 1], [0, 2]]])
    grid = grid_from_naflex(coord, None, 3, 4, 1)
    assert grid.valid is None
    assert torch.equal(grid.coords, coord)
    assert tuple(grid[:3]) == (3, 4, 1)


VALID = torch.tensor([[True, False], [True, True]])


@pytest.mark.parametrize(
    ("patch_coord", "patch_valid", "size", "error", "message"),
    [
        (torch.zeros(2, 2, 2), VALID, (3, 4), TypeError, "patch_coord must hold integers, got dtype torch.float32"),
        (torch.zeros(2, 2, dtype=int), VALID, (3, 4), ValueError, r"patch_coord .* \(B, P, 2\), got \(2, 2\)"),
        (torch.zeros(2, 2, 2, dtype=int), VALID.int(), (3, 4), TypeError, "patch_valid must be boolean, got .*int32"),
        (torch.zeros(2, 2, 2, dtype=int), VALID[:1], (3, 4), ValueError, r"patch_valid .* \(2, 2\), got \(1, 2\)"),
        (torch.full((2, 2, 2), 3), VALID, (3, 4), ValueError, "patch_coord: rows from 0 to 3, the grid has 0 to 2"),
        (torch.full((2, 2, 2), 3), None, (4, 3), ValueError, "patch_coord: columns from 3 to 3, .* has 0 to 2"),
        (torch.zeros(2, 2, 2, dtype=int), VALID, (3, 0), ValueError, "width must be at least 1, got 0"),
    ],
)
def test_naflex_errors(patch_coord, patch_valid, size, error, message):
    with pytest.raises(error, match=message):
        grid_from_naflex(patch_coord, patch_valid, *size)


class NaflexAttention(torch.nn.Module):
    def __init__(self, terms):
        super().__init__()
        self.terms = terms

    def forward(self, x, patch_coord, patch_valid):
        return relative_attention(x, x, x, self.terms, grid_from_naflex(patch_coord, patch_valid, 3, 4))


@pytest.mark.parametrize("how", ["compile", "export"])
def test_a_graph_does_not_read_coordinates(how):
    generator = torch.Generator().manual_seed(0)
    x = draw(generator, 2, HEADS, 6, DIM)
    layouts = [
        (torch.stack((y, x), dim=-1), torch.rand(2, 6, generator=generator) < 0.7)
        for y, x in [[torch.randint(size, (2, 6), generator=generator) for size in (3, 4)] for _ in range(2)]
    ]
    module = NaflexAttention(draw_terms(generator, "qkvb", (1, 2), DIM, HEADS))
    if how == "compile":
        graph = torch.compile(module, backend="eager", fullgraph=True)
    else:
        graph = torch.export.export(module, (x, *layouts[0])).module()
    for layout in layouts:
        torch.testing.assert_close(graph(x, *layout), module(x, *layout), rtol=0, atol=1e-12)


class Case(NamedTuple):
    """One example: queries, keys and values (3, B, HEADS, N, DIM), the tables, and the options all runs share."""

    qkv: torch.Tensor
    terms: RelativeTerms
    generator: torch.Generator
    height: int
    width: int
    prefix: int
    backend: str

    @property
    def inputs(self):
        return [self.qkv, *tables_of(self.terms)]

    def run(self, coords, valid, qkv):
        grid = make_grid(self.height, self.width, self.prefix, coords, valid)
        return relative_attention(*qkv, self.terms, grid, backend=self.backend)

    def with_prefix(self, tokens):
        """Numbers of the patches of each sample (B, P) -> numbers of the tokens, prefix tokens first."""
        first = torch.arange(self.prefix).expand(tokens.shape[0], -1)
        return torch.cat((first, tokens + self.prefix), dim=1)


@st.composite
def cases(draw_one, most_prefix=2):
    height, width, prefix = (
        draw_one(st.integers(1, 4)),
        draw_one(st.integers(1, 4)),
        draw_one(st.integers(0, most_prefix)),
    )
    reach = st.sampled_from([0, 1, 2, 9])
    which = draw_one(st.sets(st.sampled_from("qkvb")))
    generator = torch.Generator().manual_seed(draw_one(st.integers(0, 2**16)))
    terms = draw_terms(generator, which, (draw_one(reach), draw_one(reach)), DIM, HEADS)
    qkv = draw(generator, 3, BATCH, HEADS, num_tokens(make_grid(height, width, prefix)), DIM)
    for leaf in (qkv, *tables_of(terms)):
        leaf.requires_grad_()
    return Case(qkv, terms, generator, height, width, prefix, draw_one(st.sampled_from(BACKENDS)))


def raster(case):
    """(BATCH, H W, 2)."""
    return torch.cartesian_prod(torch.arange(case.height), torch.arange(case.width)).expand(BATCH, -1, -1)


def orders(case):
    """A random order of the patches for each sample, (BATCH, H W)."""
    patches = case.height * case.width
    return torch.stack([torch.randperm(patches, generator=case.generator) for _ in range(BATCH)])


def take(x, tokens):
    """Tokens of each sample: (..., B, HEADS, N, DIM), (B, M) -> (..., B, HEADS, M, DIM)."""
    return x.gather(-2, tokens[:, None, :, None].expand(*x.shape[:-2], -1, x.shape[-1]))


@settings(max_examples=40, deadline=None)
@given(case=cases(), data=st.data())
def test_dropping_patches_equals_masking_them(case, data):
    number = data.draw(st.integers(1, case.height * case.width))
    kept = orders(case)[:, :number]
    valid = torch.zeros(BATCH, case.height * case.width, dtype=torch.bool).scatter(1, kept, True)
    tokens = case.with_prefix(kept)
    cotangent = draw(case.generator, BATCH, HEADS, tokens.shape[1], DIM)

    dropped = case.run(raster(case).gather(1, kept[..., None].expand(-1, -1, 2)), None, take(case.qkv, tokens))
    masked = take(case.run(None, valid, case.qkv), tokens)
    torch.testing.assert_close(dropped, masked, rtol=0, atol=1e-10)
    got, expected = (gradients(out, case.inputs, cotangent) for out in (dropped, masked))
    assert_all_close(got, expected, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(case=cases(), masked=st.booleans())
def test_permuting_and_shifting_tokens_with_their_coordinates_permutes_the_output(case, masked):
    order = orders(case)
    valid = torch.ones(order.shape, dtype=torch.bool)
    if masked:  # at least one key of each sample stays
        valid = (torch.rand(order.shape, generator=case.generator) < 0.6).scatter(1, order[:, :1], True)
    tokens = case.with_prefix(order)
    expected = take(case.run(None, valid, case.qkv), tokens)
    coords = raster(case).gather(1, order[..., None].expand(-1, -1, 2))
    larger = case._replace(height=case.height + 5, width=case.width + 2)
    permuted = larger.run(coords + torch.tensor([5, 2]), valid.gather(1, order), take(case.qkv, tokens))
    torch.testing.assert_close(permuted, expected, rtol=0, atol=1e-10)
    cotangent = draw(case.generator, *expected.shape)
    got, want = (gradients(out, case.inputs, cotangent) for out in (permuted, expected))
    assert_all_close(got, want, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(case=cases(most_prefix=0), with_coords=st.booleans(), empty=st.integers(0, BATCH - 1))
def test_a_sample_without_valid_key_gives_zeros_and_does_not_touch_the_others(case, with_coords, empty):
    valid = torch.ones(BATCH, case.height * case.width, dtype=torch.bool)
    valid[empty] = False
    out = case.run(raster(case) if with_coords else None, valid, case.qkv)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    cotangent = draw(case.generator, *out.shape)
    got = gradients(out, case.inputs, cotangent)
    assert not got[0][:, empty].any()

    other = 1 - empty
    alone = case.run(None, None, case.qkv[:, other : other + 1])
    torch.testing.assert_close(out[other], alone[0], rtol=0, atol=1e-10)
    assert_all_close(got, gradients(alone, case.inputs, cotangent[other : other + 1]), atol=1e-10)
