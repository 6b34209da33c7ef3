"""Windows compared with attention on the whole grid under a mask, and with Swin's cyclic shift and mask."""

import pytest
import torch
from draws import assert_same, draw, draw_terms, tables_of
from timm.models.swin_transformer import SwinTransformerBlock, window_partition

from relvit.ops import Grid, from_windows, make_grid, relative_attention, to_windows

BATCH, HEADS, DIM = 2, 2, 5
# Each division has grid, window size and shift: whole windows, windows beyond one or both borders on one or both axes,
# windows larger than the grid.
DIVISIONS = [
    ((4, 6), (2, 3), (0, 0)),
    ((4, 6), (2, 3), (1, 2)),
    ((5, 7), (2, 3), (0, 0)),
    ((5, 7), (3, 2), (2, 1)),
    ((4, 6), (2, 4), (1, 0)),
    ((3, 7), (2, 2), (0, 1)),
    ((2, 3), (4, 5), (3, 4)),
    ((2, 3), (4, 5), (1, 0)),
]


def windows_by_hand(length, size, shift):
    """Return the number of the window of each row (or column): new windows begin at shift, shift + size ..."""
    starts = range(shift, length, size)
    return [sum(start <= number for start in starts) for number in range(length)]


def same_window(shape, size, shift):
    """Return whether two patches are in one window, (H W, H W) booleans."""
    rows, cols = (windows_by_hand(*axis) for axis in zip(shape, size, shift, strict=True))
    window = [(row, col) for row in rows for col in cols]
    return torch.tensor([[one == other for other in window] for one in window])


def valid_patches(kind, patches):
    generator = torch.Generator().manual_seed(4)
    # Few patches are valid, so that in some windows no query has a key.
    return {
        "all": None,
        "alike": torch.rand(patches, generator=generator) < 0.4,
        "by sample": torch.rand(BATCH, patches, generator=generator) < 0.4,
    }[kind]


def by_window(x, grid, size, shift):
    """(B, heads, H W, dim) -> (B n, heads, rows columns, dim)."""
    windows, inside = to_windows(x.transpose(1, 2).flatten(2), grid, size, shift)
    return windows.unflatten(-1, (HEADS, DIM)).transpose(1, 2), inside


def test_windows_and_their_tokens_are_in_raster_order():
    x = torch.arange(2 * 3 * 5).reshape(2, 15, 1)  # The images are two samples of 3 x 5 patches.
    windows, inside = to_windows(x, make_grid(3, 5), (2, 3), (1, 0))
    assert windows[4:, :, 0].tolist() == [
        [0, 0, 0, 15, 16, 17],
        [0, 0, 0, 18, 19, 0],
        [20, 21, 22, 25, 26, 27],
        [23, 24, 0, 28, 29, 0],
    ]
    assert inside.valid[:4].int().tolist() == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1, 0],
    ]
    assert tuple(inside[:4]) == (2, 3, 0, None)


@pytest.mark.parametrize("valid", ["all", "alike", "by sample"])
@pytest.mark.parametrize(("shape", "size", "shift"), DIVISIONS)
def test_attention_in_windows_equals_attention_with_a_mask_of_pairs(shape, size, shift, valid):
    generator = torch.Generator().manual_seed(1)
    patches = shape[0] * shape[1]
    grid = make_grid(*shape, valid=valid_patches(valid, patches))
    terms = draw_terms(generator, "qkvb", (1, 2), DIM, HEADS)
    qkv = draw(generator, 3, BATCH, HEADS, patches, DIM)
    inputs = [leaf.requires_grad_() for leaf in (qkv, *tables_of(terms))]

    windows, insides = zip(*(by_window(part, grid, size, shift) for part in qkv), strict=True)
    mixed = relative_attention(*windows, terms, insides[0])
    got = from_windows(mixed.transpose(1, 2).flatten(2), grid, size, shift)
    got = got.unflatten(-1, (HEADS, DIM)).transpose(1, 2)

    allowed = same_window(shape, size, shift)
    expected = relative_attention(*qkv, terms, grid, attn_mask=allowed, backend="reference")
    assert_same(got, expected, inputs, atol=1e-10)


@pytest.mark.parametrize(("size", "shift"), [((2, 3), (1, 2)), ((4, 2), (3, 1)), ((2, 3), (1, 0)), ((4, 3), (2, 1))])
def test_pairs_in_shifted_windows_are_those_of_swin(size, shift):
    height, width = 8, 6
    patches = torch.arange(height * width)
    block = SwinTransformerBlock(
        4, (height, width), num_heads=1, window_size=size, shift_size=shift, always_partition=True
    )
    assert (block.window_size, block.shift_size) == (size, shift)
    # Numbered patches show where the roll moves each patch.
    rolled = patches.reshape(1, height, width, 1).roll((-shift[0], -shift[1]), dims=(1, 2))
    swin = set()
    for numbers, mask in zip(window_partition(rolled, size).flatten(1).tolist(), block.attn_mask, strict=True):
        swin |= {(numbers[i], numbers[j]) for i, j in (mask == 0).nonzero().tolist()}

    windows, inside = to_windows(patches[None, :, None], make_grid(height, width), size, shift)
    ours = set()
    for numbers, valid in zip(windows[..., 0], inside.valid, strict=True):
        together = numbers[valid].tolist()
        ours |= {(one, other) for one in together for other in together}
    assert ours == swin
    # The mask separates some pairs that the roll has brought into one window.
    assert len(swin) < height * width * size[0] * size[1]


class RunningSums(torch.nn.Module):
    """Compute sums within each window, plus one for valid patches if windows may extend beyond the border."""

    def __init__(self, size, shift):
        super().__init__()
        self.division = (size, shift)

    def forward(self, x):  # (B, C, H, W)
        grid = Grid(*x.shape[2:])
        windows, inside = to_windows(x.flatten(2).transpose(1, 2), grid, *self.division)
        windows = windows.cumsum(1) if inside.valid is None else windows.cumsum(1) + inside.valid[..., None]
        return from_windows(windows, grid, *self.division)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [(0, 0), (1, 2)])
def test_exported_once_for_all_sizes(shift):
    module = RunningSums((2, 3), shift)
    generator = torch.Generator().manual_seed(3)
    # Without a shift, tracing decides whether windows extend beyond the border, so the graph is for multiples of the
    # window.
    sizes = {2: 2 * torch.export.Dim("down", min=2, max=50), 3: 3 * torch.export.Dim("across", min=2, max=50)}
    exported = torch.export.export(module, (draw(generator, 2, 3, 8, 12),), dynamic_shapes=(sizes,)).module()
    for height, width in [(8, 12), (4, 30), (12, 6)]:
        x = draw(generator, 2, 3, height, width)
        torch.testing.assert_close(exported(x), module(x), rtol=0, atol=1e-12)


class MaskedWindows(torch.nn.Module):
    """Attention of a padded batch in windows of 2 x 2 of its 2 x 3 patches."""

    def __init__(self, terms):
        super().__init__()
        self.terms = terms

    def forward(self, x, valid):
        windows, grid = to_windows(x, Grid(2, 3, valid=valid), 2)
        heads = windows.unflatten(2, (HEADS, DIM)).transpose(1, 2)
        return relative_attention(heads, heads, heads, self.terms, grid)


@pytest.mark.slow
def test_exported_for_batches_of_as_many_images_as_there_are_patches():
    generator = torch.Generator().manual_seed(3)
    module = MaskedWindows(draw_terms(generator, "kv", (2, 2), DIM, HEADS))
    batch = torch.export.Dim("batch", min=1, max=64)
    inputs = lambda number: (  # noqa: E731
        draw(generator, number, 6, HEADS * DIM),
        torch.rand(number, 6, generator=generator) < 0.7,
    )
    exported = torch.export.export(module, inputs(2), dynamic_shapes=({0: batch}, {0: batch})).module()
    for number in (1, 4, 6):
        given = inputs(number)
        torch.testing.assert_close(exported(*given), module(*given), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "grid", "size", "shift", "error", "message"),
    [
        (12, (3, 4), 2, 0, TypeError, r"grid must be a Grid, after the tokens .*, got tuple"),
        (12, make_grid(3, 4, prefix=1), 2, 0, ValueError, r"prefix tokens \(1\), which belong to no window"),
        (2, make_grid(3, 4, coords=torch.tensor([[0, 0], [2, 3]])), 2, 0, ValueError, "grid has coords, windows need"),
        (11, make_grid(3, 4), 2, 0, ValueError, r"x has shape \(2, 11, 5\), expected \(B, 12, C\): grid has 3 x 4"),
        (12, make_grid(3, 4, valid=torch.ones(3, 12) > 0), 2, 0, ValueError, r"grid.valid .* \(12,\) or \(2, 12\)"),
        (12, make_grid(3, 4), 0, 0, ValueError, "size must be at least 1, got 0"),
        (12, make_grid(3, 4), 2, -1, ValueError, "shift must be at least 0, got -1"),
        (12, make_grid(3, 4), 2, True, TypeError, "shift must hold integers, got True"),
        (12, make_grid(3, 4), (2, 3), (1, 3), ValueError, r"shift must be less than size, got shift \(1, 3\) with"),
    ],
)
def test_errors(tokens, grid, size, shift, error, message):
    with pytest.raises(error, match=message):
        to_windows(torch.zeros(2, tokens, 5), grid, size, shift)


@pytest.mark.parametrize("shape", [(7, 4, 5), (8, 6, 5), (8, 20)])
def test_windows_that_do_not_fit_the_grid(shape):
    with pytest.raises(ValueError, match=r"windows has shape .*, expected \(B \* 4, 4, C\): 2 x 2 windows of 2 x 2"):
        from_windows(torch.zeros(shape), make_grid(3, 4), 2)


def test_arguments_in_another_order_are_named():
    x, grid = torch.randn(2, 24, 3), make_grid(4, 6)
    for call in (to_windows, from_windows):
        with pytest.raises(TypeError, match=r"grid must be a Grid, after the tokens .*, got Tensor"):
            call(grid, x, 2)
        with pytest.raises(TypeError, match="must be a tensor, got Grid"):
            call(grid, grid, 2)
