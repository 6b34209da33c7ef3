"""The axial embedding compared with `interpolate`, patch by patch."""

import pytest
import torch
import torch.nn.functional as F

from relvit.layers import AxialPositionEmbedding
from relvit.ops import Grid, make_grid, patch_coords

ROWS, COLS, DIM = 5, 9, 6
COMBINES = ["concat", "sum"]


def build(combine="concat", dtype=torch.float64):
    torch.manual_seed(0)
    widths = (2, 4) if combine == "concat" else None
    return AxialPositionEmbedding(DIM, (ROWS, COLS), combine, widths, init_std=1.0, dtype=dtype)


def vector_by_hand(table, index, size):
    """Return the vector of one row or column, of the table itself or of the stretched table."""
    if size > len(table):
        table = F.interpolate(table.T[None], size=size, mode="linear", align_corners=False)[0].T
    return table[index]


def patch_by_hand(embedding, y, x, height, width):
    row, col = vector_by_hand(embedding.rows, y, height), vector_by_hand(embedding.cols, x, width)
    return row + col if embedding.combine == "sum" else torch.cat((row, col))


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("size", [(5, 9), (3, 4), (7, 12), (3, 12), (1, 1), (61, 9)], ids=str)
def test_each_axis_is_sliced_or_stretched(combine, size):
    embedding = build(combine)
    expected = [patch_by_hand(embedding, y, x, *size) for y in range(size[0]) for x in range(size[1])]
    # Prefix tokens get no embedding.
    out = embedding(make_grid(*size, prefix=2))
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=1e-14)


def test_slices_are_exact():
    embedding = build(dtype=torch.float32)
    out = embedding(make_grid(3, 4)).unflatten(0, (3, 4))
    assert torch.equal(out[2], torch.cat((embedding.rows[2].expand(4, 2), embedding.cols[:4]), dim=1))


@pytest.mark.parametrize("size", [(4, 7), (7, 12)])
def test_patches_with_coordinates(size):
    embedding = build()
    generator = torch.Generator().manual_seed(1)
    coords = torch.stack([torch.randint(0, most, (2, 11), generator=generator) for most in size], dim=-1)
    coords = coords.to(torch.int32)
    expected = torch.stack(
        [torch.stack([patch_by_hand(embedding, *patch, *size) for patch in sample]) for sample in coords.tolist()]
    )
    torch.testing.assert_close(embedding(make_grid(*size, 1, coords)), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(embedding(make_grid(*size, 1, coords[0])), expected[0], rtol=0, atol=1e-14)
    outside = embedding(Grid(7, 12, 0, torch.tensor([[-3, 40], [9, -1]])))
    assert torch.equal(outside[0], torch.cat((embedding.rows[0], embedding.cols[-1])))
    assert torch.equal(outside[1], torch.cat((embedding.rows[-1], embedding.cols[0])))


def test_a_new_grid_size_keeps_what_its_grid_gets():
    for size in [(3, 12), (8, 4)]:
        embedding = build()
        embedding.rows.requires_grad_(False)
        before = embedding(make_grid(*size))
        embedding.set_grid_size(size)
        assert embedding.grid_size == size
        assert torch.equal(embedding(make_grid(*size)), before)
        assert (embedding.rows.requires_grad, embedding.cols.requires_grad) == (False, True)


@pytest.mark.parametrize(("combine", "dim", "widths"), [("concat", 7, (3, 4)), ("sum", 7, (7, 7))])
def test_parameters_and_their_initialisation(combine, dim, widths):
    torch.manual_seed(0)
    embedding = AxialPositionEmbedding(dim, (400, 500), combine)
    assert (embedding.rows.shape, embedding.cols.shape) == ((400, widths[0]), (500, widths[1]))
    assert embedding.no_weight_decay() == set(embedding.state_dict()) == {"rows", "cols"}
    torch.nn.init.constant_(embedding.cols, torch.nan)
    embedding.init_weights()
    for table in embedding.parameters():
        assert abs(float(table.detach().std()) - 0.02) < 0.002
        assert abs(float(table.detach().mean())) < 0.002
    assert not any(table.any() for table in AxialPositionEmbedding(4, (2, 3), init_std=0).parameters())


@pytest.mark.parametrize("combine", COMBINES)
def test_gradients(combine):
    embedding = build(combine)

    def out(rows, cols):
        return torch.func.functional_call(embedding, {"rows": rows, "cols": cols}, (make_grid(7, 4),))

    assert torch.autograd.gradcheck(out, tuple(embedding.parameters()))


def test_gradients_in_bfloat16_are_summed_without_rounding():
    exact, half = build(), build(dtype=torch.bfloat16)
    # Each row has 9 patches in each of 256 images with the gradient 1, and a sum in bfloat16 would end at 256.
    grid = make_grid(ROWS, COLS, coords=patch_coords(make_grid(ROWS, COLS)).expand(256, -1, -1))
    for embedding in (exact, half):
        embedding(grid).sum().backward()
    for one, other in zip(half.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0.01, atol=0)


def test_bfloat16_rounds_once_and_the_meta_device_works():
    exact, half = build(), build(dtype=torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    for size in [(3, 4), (7, 12)]:
        out = half(make_grid(*size))
        assert out.dtype == torch.bfloat16
        # The result is rounded once. Near the border between two bfloat16 numbers, float32's error may change it.
        assert (out == exact(make_grid(*size)).bfloat16()).double().mean() > 0.99
    out = AxialPositionEmbedding(4, (2, 3), device="meta", dtype=torch.float16)(make_grid(5, 2))
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.float16, (10, 4))
