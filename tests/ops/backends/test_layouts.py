"""Tokens that do not fill the grid: NaFlex batches, and graphs for any coordinates."""

import pytest
import torch
from draws import BACKENDS, draw, draw_terms
from einops import rearrange
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify

from relvit.ops import grid_from_naflex, make_grid, relative_attention

pytestmark = pytest.mark.usefixtures("several_tiles")

PATCH = 4
HEADS, DIM = 2, 5
# If padding affected any output, this number would dominate it.
GARBAGE = 1e5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_naflex_batch_equals_its_images_one_by_one(backend):
    prefix, generator = 2, torch.Generator().manual_seed(0)
    sizes = [(2, 5), (4, 3), (3, 1)]
    photos = [torch.rand(3, PATCH * h, PATCH * w, generator=generator) for h, w in sizes]
    batch, _ = NaFlexCollator(max_seq_len=13)([(Patchify(PATCH)(photo), 0) for photo in photos])
    patches, coord, valid = batch["patches"].double(), batch["patch_coord"], batch["patch_valid"]
    # timm fills padding with zeros, but other loaders may not.
    patches = torch.where(valid[..., None], patches, GARBAGE)
    coord = torch.where(valid[..., None], coord, torch.tensor([-7, 1000]))
    grid = grid_from_naflex(coord, valid, 4, 6, prefix)

    project, first = draw(generator, 3, patches.shape[-1], HEADS * DIM), draw(generator, 3, prefix, HEADS * DIM)
    terms = draw_terms(generator, "qkvb", (2, 3), DIM, HEADS)

    def tokens_of(patches):  # (B, P, C) -> queries, keys, values, (3, B, HEADS, prefix + P, DIM)
        placed = torch.einsum("bpc,tcd->tbpd", patches, project)
        placeless = first[:, None].expand(-1, patches.shape[0], -1, -1)
        return torch.cat((placeless, placed), dim=2).unflatten(-1, (HEADS, DIM)).transpose(2, 3)

    out = relative_attention(*tokens_of(patches), terms, grid, backend=backend)
    for sample, (photo, (h, w)) in enumerate(zip(photos, sizes, strict=True)):
        alone = rearrange(photo.double(), "c (h down) (w across) -> 1 (h w) (down across c)", down=PATCH, across=PATCH)
        alone = tokens_of(alone)
        expected = relative_attention(*alone, terms, make_grid(h, w, prefix), backend=backend)
        torch.testing.assert_close(out[sample, :, : alone.shape[3]], expected[0], rtol=0, atol=1e-12)


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
        (
            torch.full((2, 2, 2), 3),
            VALID,
            (3, 4),
            ValueError,
            "patch_coord holds rows from 0 to 3, the grid has rows from 0 to 2",
        ),
        (
            torch.full((2, 2, 2), 3),
            None,
            (4, 3),
            ValueError,
            "patch_coord holds columns from 3 to 3, .* has columns from 0 to 2",
        ),
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


@pytest.mark.parametrize("how", [pytest.param("compile", marks=pytest.mark.slow), "export"])
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
