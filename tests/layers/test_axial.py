import pytest
import torch
import torch.nn.functional as F
from timm.models._features_fx import create_feature_extractor

from relvit.layers import AxialPositionEmbedding
from relvit.ops import Grid, make_grid

ROWS, COLS, DIM = 5, 9, 6
FORMS = [
    {},
    {"widths": (2, 4)},
    {"combine": "sum"},
]
SIZES = [(5, 9), (3, 4), (7, 12), (3, 12), (8, 2), (1, 1), (61, 9)]


def build(dtype=torch.float64, **form):
    torch.manual_seed(0)
    return AxialPositionEmbedding(DIM, (ROWS, COLS), init_std=1.0, dtype=dtype, **form)


def line_by_hand(table, line, size):
    """The vector of one row or column: its own, or between two neighbours of a stretched table."""
    number = len(table)
    if size <= number:
        return table[line]
    place = (line + 0.5) * number / size - 0.5
    if place <= 0:
        return table[0]
    if place >= number - 1:
        return table[-1]
    before = int(place)
    return (1 - (place - before)) * table[before] + (place - before) * table[before + 1]


def patch_by_hand(embedding, y, x, height, width):
    row, col = line_by_hand(embedding.rows, y, height), line_by_hand(embedding.cols, x, width)
    return row + col if embedding.combine == "sum" else torch.cat((row, col))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_axis_is_sliced_or_stretched(form, size):
    embedding = build(**form)
    expected = [patch_by_hand(embedding, y, x, *size) for y in range(size[0]) for x in range(size[1])]
    # A prefix changes nothing: its tokens get no embedding.
    out = embedding(make_grid(*size, prefix=2))
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [(5, 9), (3, 4), (1, 7)])
def test_slices_are_the_tables_own_numbers(size):
    embedding = build(torch.float32, widths=(2, 4))
    out = embedding(make_grid(*size)).unflatten(0, size)
    for y in range(size[0]):
        assert torch.equal(out[y, :, :2], embedding.rows[y].expand(size[1], 2))
        assert torch.equal(out[y, :, 2:], embedding.cols[: size[1]])


def test_stretching_is_that_of_interpolate():
    embedding = build(combine="sum")
    for table, size in ((embedding.rows, (23, 1)), (embedding.cols, (1, 31))):
        expected = F.interpolate(table.T[None], size=max(size), mode="linear", align_corners=False)[0].T
        other = embedding.cols[0] if size[1] == 1 else embedding.rows[0]
        torch.testing.assert_close(embedding(make_grid(*size)), expected + other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [(4, 7), (6, 5), (7, 12)])
def test_patches_with_coordinates(form, size):
    embedding = build(**form)
    generator = torch.Generator().manual_seed(1)
    coords = torch.stack([torch.randint(0, most, (2, 11), generator=generator) for most in size], dim=-1)
    coords = coords.to(torch.int32)
    expected = torch.stack(
        [torch.stack([patch_by_hand(embedding, *place, *size) for place in sample]) for sample in coords.tolist()]
    )
    torch.testing.assert_close(embedding(make_grid(*size, 1, coords)), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(embedding(make_grid(*size, 1, coords[0])), expected[0], rtol=0, atol=1e-14)


def test_coordinates_outside_are_those_of_the_nearest_vector():
    embedding = build()
    outside = embedding(Grid(7, 12, 0, torch.tensor([[-3, 40], [9, -1]])))
    assert torch.equal(outside[0], torch.cat((embedding.rows[0], embedding.cols[-1])))
    assert torch.equal(outside[1], torch.cat((embedding.rows[-1], embedding.cols[0])))


def test_a_new_grid_size_keeps_what_its_grid_is_given():
    for size in [(3, 12), (8, 4)]:
        embedding = build(widths=(4, 2))
        embedding.rows.requires_grad_(False)
        before = embedding(make_grid(*size))
        embedding.set_grid_size(size)
        assert embedding.grid_size == size
        assert torch.equal(embedding(make_grid(*size)), before)
        assert not embedding.rows.requires_grad
        assert embedding.cols.requires_grad
    embedding.set_grid_size(2)
    assert embedding.grid_size == (2, 2)


@pytest.mark.parametrize(
    ("form", "count"),
    [({}, 5 * 3 + 9 * 3), ({"widths": (2, 4)}, 5 * 2 + 9 * 4), ({"combine": "sum"}, (5 + 9) * 6)],
    ids=str,
)
def test_number_of_parameters(form, count):
    embedding = build(**form)
    assert sum(parameter.numel() for parameter in embedding.parameters()) == count
    assert embedding.no_weight_decay() == set(embedding.state_dict()) == {"rows", "cols"}


def test_an_odd_channel_tells_the_column():
    embedding = AxialPositionEmbedding(7, (2, 3))
    assert embedding.rows.shape == (2, 3)
    assert embedding.cols.shape == (3, 4)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [(3, 4), (7, 12), (2, 11)])
def test_gradients(form, size):
    embedding = build(**form)

    def out(rows, cols):
        return torch.func.functional_call(embedding, {"rows": rows, "cols": cols}, (make_grid(*size),))

    assert torch.autograd.gradcheck(out, tuple(embedding.parameters()))


def test_bfloat16_rounds_once():
    exact, half = build(torch.float64), build(torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    for size in [(3, 4), (7, 12)]:
        out = half(make_grid(*size))
        assert out.dtype == torch.bfloat16
        # Up to float32's error at the border between two neighbours.
        torch.testing.assert_close(out.double(), exact(make_grid(*size)).bfloat16().double(), rtol=2**-7, atol=0)
        assert (out == exact(make_grid(*size)).bfloat16()).double().mean() > 0.99


def test_tables_start_from_a_truncated_normal_or_at_zero():
    torch.manual_seed(0)
    embedding = AxialPositionEmbedding(64, (40, 50))
    for table in embedding.parameters():
        assert abs(float(table.detach().std()) - 0.02) < 0.001
        assert abs(float(table.detach().mean())) < 0.001
    before = embedding.rows.detach().clone()
    embedding.init_weights()
    assert not torch.equal(embedding.rows, before)
    assert not any(table.any() for table in AxialPositionEmbedding(4, (2, 3), init_std=0).parameters())


def test_device_and_dtype():
    embedding = AxialPositionEmbedding(4, (2, 3), device="meta", dtype=torch.float16)
    out = embedding(make_grid(5, 2))
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.float16, (10, 4))
    embedding = embedding.to_empty(device="cpu").float()
    torch.nn.init.constant_(embedding.rows, torch.nan)
    embedding.init_weights()
    assert not embedding.rows.isnan().any()


class Positioned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.position = build(torch.float32)

    def forward(self, x):
        return self.position(Grid(x.shape[0], x.shape[1]))


def test_one_graph_serves_every_size():
    module = Positioned()
    x = torch.zeros(4, 6)
    sizes = {name: torch.export.Dim(name, min=2, max=64) for name in ("height", "width")}
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: sizes["height"], 1: sizes["width"]},)).module()
    traced = create_feature_extractor(module, {"position": "out"})
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in [(5, 9), (3, 4), (7, 12), (3, 12)]:
        x = torch.zeros(size)
        expected = module(x)
        assert torch.equal(exported(x), expected)
        assert torch.equal(traced(x)["out"], expected)
        with torch._dynamo.config.patch(error_on_recompile=size != (5, 9)):
            out = compiled(x)
        assert torch.equal(out, expected)
        tables = list(module.parameters())
        for got, grad in zip(*(torch.autograd.grad(y.square().sum(), tables) for y in (out, expected)), strict=True):
            torch.testing.assert_close(got, grad)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"combine": "concatenate"},
            ValueError,
            r"combine must be one of 'concat', 'sum', got 'concatenate' \(did you mean 'concat'\?\)",
        ),
        ({"widths": (2, 3)}, ValueError, r"widths must add up to dim 6, got \(2, 3\), which is 5"),
        ({"widths": (0, 6)}, ValueError, "widths must be at least 1"),
        ({"widths": (3, 3.0)}, TypeError, "widths must hold integers"),
        ({"widths": (3, 3), "combine": "sum"}, ValueError, r"widths is for combine 'concat', got widths=\(3, 3\)"),
        ({"grid_size": (0, 3)}, ValueError, "grid_size must be at least 1"),
        ({"grid_size": 2.5}, TypeError, "grid_size must hold integers, got 2.5"),
        ({"init_std": -0.1}, ValueError, "init_std must not be negative, got -0.1"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        AxialPositionEmbedding(DIM, **{"grid_size": (ROWS, COLS), **arguments})


def test_it_wants_a_grid():
    with pytest.raises(TypeError, match=r"grid must be a Grid, got Tensor: make_grid\(height, width\) makes one"):
        AxialPositionEmbedding(8, (3, 4))(torch.zeros(1, 12, 8))
