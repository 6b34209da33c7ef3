"""Figures: pixels of the confusion matrix and the sheet, lines of training curves and of curves by image size."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from PIL import Image

from relvit.app.plots import (
    plot_confusion,
    plot_curves,
    plot_probes,
    plot_sheet,
    plot_size_grid,
    plot_sizes,
    plot_steps,
    plot_tables,
    read_metrics,
)

pytestmark = pytest.mark.usefixtures("figures")

METRICS = """epoch,lr,step,train/acc1,train/loss,val/acc1,val/loss
0,,9,,,0.25,2.0
0,0.1,9,0.2,2.2,,
1,,19,,,0.5,1.5
1,0.05,19,0.4,1.75,,
2,,29,,,0.5,1.6
2,0.01,29,0.5,1.5,,
"""


@pytest.fixture
def recorded(monkeypatch):
    """Record the figures instead of writing files, because drawing takes long."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, target, **options: (found.append(self), target.touch()))
    return found


def pixels(path):
    with Image.open(path) as figure:
        return np.asarray(figure.convert("RGB")).astype(int)


def test_each_of_a_thousand_classes_has_its_pixels(tmp_path, monkeypatch):
    recorded, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (recorded.append(self), save(self, *args, **kw)))
    plot_confusion(np.eye(1000, dtype=int), [f"$na_me$ {i}" for i in range(1000)], tmp_path / "a.png")
    drawn = pixels(tmp_path / "a.png")
    left, bottom, right, top = recorded[0].axes[0].get_window_extent().extents.round().astype(int)
    inside = drawn[len(drawn) - top : len(drawn) - bottom, left:right][2:-2, 2:-2]
    # Pixels on the diagonal are darker than the lightest colour of "Blues". Every row of pixels has some, and they move
    # right with the rows.
    rows, columns = np.nonzero(abs(inside - (247, 251, 255)).sum(-1) > 6)
    assert len(np.unique(rows)) == len(inside) >= 1000
    assert (np.diff([columns[rows == row].mean() for row in range(0, len(inside), 20)]) > 0).all()
    assert drawn.shape[1] <= 1800


def test_columns_are_predictions_and_colours_proportions_of_rows(tmp_path):
    plot_confusion(np.array([[0, 30], [0, 0]]), ["a", "b"], tmp_path / "a.png")
    figure = pixels(tmp_path / "a.png")
    # This is the darkest colour of "Blues"; the colour bar is right of the axes.
    rows, columns = np.nonzero((abs(figure - (8, 48, 107)).sum(-1) < 6)[:, :400])
    assert len(rows) > 5000
    assert rows.max() < 0.5 * figure.shape[0]
    assert columns.min() > 0.3 * figure.shape[1]


def test_neighbours_share_the_cells_of_very_many_classes(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr("relvit.app.plots.confusion.CELLS", 9)
    confusion = np.random.default_rng(0).integers(5, size=(25, 25))
    plot_confusion(confusion, [f"name {i}" for i in range(25)], tmp_path / "a.png")
    (image,) = recorded[0].axes[0].images
    starts = range(0, 25, 3)
    blocks = [[confusion[i : i + 3, j : j + 3].sum() for j in starts] for i in starts]
    np.testing.assert_allclose(image.get_array(), blocks / np.sum(blocks, 1, keepdims=True))
    # The axes still count classes.
    assert tuple(image.get_extent()) == (-0.5, 24.5, 24.5, -0.5)


def test_sixty_classes_have_names(tmp_path, recorded):
    for classes in (60, 61):
        plot_confusion(np.eye(classes, dtype=int), [f"name {i}" for i in range(classes)], tmp_path / "a.png")
    shown = [[label.get_text() for label in figure.axes[0].get_yticklabels()] for figure in recorded]
    assert shown[0] == [f"name {i}" for i in range(60)]
    assert "name 0" not in shown[1]


def test_sheet(tmp_path):
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200), (200, 0, 200)]
    images = [np.full((4 + i, 9 - i, 3), colour, np.uint8) for i, colour in enumerate(colours)]
    plot_sheet(images, [f"a$b\nline {i}" for i in range(6)], tmp_path / "sheet.png", "title")
    figure, centres = pixels(tmp_path / "sheet.png"), []
    for image, colour in zip(images, colours, strict=True):
        rows, columns = np.nonzero(abs(figure - colour).sum(-1) < 10)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert height / width == pytest.approx(image.shape[0] / image.shape[1], rel=0.05)
        centres.append((rows.mean(), columns.mean()))
    assert [column for _, column in centres[:5]] == sorted(column for _, column in centres[:5])
    assert centres[5][0] > max(row for row, _ in centres[:5])
    assert centres[5][1] == pytest.approx(centres[0][1], abs=15)


def curves(axes):
    """Return the points of each line, by its label."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def draw_curves(text, tmp_path, *title):
    (tmp_path / "metrics.csv").write_text(text)
    plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png", *title)


@pytest.fixture
def panels(tmp_path, recorded):
    """Return the panels of loss, accuracy and learning rate for a training of three epochs."""
    draw_curves(METRICS, tmp_path, "train (labels smoothed by 0.1)")
    return recorded[0].axes


def test_metrics_are_read_by_epoch(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    assert read_metrics(tmp_path / "metrics.csv")["val/acc1"] == [(0, 0.25), (1, 0.5), (2, 0.5)]


def test_three_panels_have_the_metrics_with_epochs_from_one(panels):
    loss, accuracy, rate = panels
    assert curves(loss)["train (labels smoothed by 0.1)"] == ([1, 2, 3], [2.2, 1.75, 1.5])
    assert curves(loss)["val"] == ([1, 2, 3], [2.0, 1.5, 1.6])
    assert curves(accuracy)["val"] == ([1, 2, 3], [0.25, 0.5, 0.5])
    assert list(curves(rate).values()) == [([1, 2, 3], [0.1, 0.05, 0.01])]
    assert [axes.get_ylabel() for axes in panels] == ["loss", "top-1 accuracy", "learning rate"]


def test_of_equal_accuracies_the_best_has_the_lower_loss(panels):
    assert curves(panels[1])["best: 0.5, epoch 2"][0] == [2, 2]


def test_with_two_validations_in_an_epoch_accuracy_and_loss_are_of_the_same(tmp_path, recorded):
    draw_curves("epoch,val/acc1,val/loss\n0,0.5,1.6\n0,0.4,9.0\n1,0.5,1.7\n1,0.3,1.0\n", tmp_path)
    assert "best: 0.5, epoch 1" in curves(recorded[0].axes[1])


def test_without_metrics_the_panels_are_empty(tmp_path, recorded):
    draw_curves("epoch,lr,step\n", tmp_path)
    assert [len(axes.lines) for axes in recorded[0].axes] == [0, 0, 0]


def test_letters_are_legible_at_half_the_size_and_legends_cover_no_curve(panels):
    loss, accuracy, _ = panels
    texts = [*loss.get_xticklabels(), loss.xaxis.label, *loss.get_legend().get_texts()]
    assert min(text.get_fontsize() for text in texts) * loss.figure.dpi / 72 / 2 > 8
    assert loss.figure.get_size_inches().tolist() == [15, 5.5]
    loss.figure.draw_without_rendering()
    assert all(axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 for axes in (loss, accuracy))


@pytest.fixture
def by_size(tmp_path, recorded):
    """Return the panels of accuracy, loss and calibration error for two models, trained at 16 and at 32 px."""
    rows = []
    for trained, sizes in ((16, [(32, 32), (16, 16), (8, 32)]), (32, [(32, 32), (8, 8)])):
        for height, width in sizes:
            row = {"train_sizes": [[trained, trained]], "height": height, "width": width}
            score = height * width / 2048 + trained / 64
            rows.append(row | {"acc1": score, "acc1_se": score / 50, "loss": 1 - score, "calibration_error": score / 2})
    plot_sizes(rows, ["a", "a", "a", "$b$", "$b$"], tmp_path / "sizes.png", "field")
    return recorded[0].axes


def test_each_model_has_a_line_over_sizes_and_its_trained_size_in_the_same_colour(by_size):
    for axes, value in zip(by_size, (lambda x: x, lambda x: 1 - x, lambda x: x / 2), strict=True):
        lines = curves(axes)
        assert lines["a"] == ([16, 16, 32], [value(0.375), value(0.375), value(0.75)])
        assert lines[r"\$b\$"] == ([8, 32], [value(0.53125), value(1)])
        assert [line.get_xdata() for line in axes.lines if list(line.get_ydata()) == [0, 1]] == [[16, 16], [32, 32]]
        of_a, trained_a, of_b, trained_b = (line.get_color() for line in axes.lines[:4])
        assert trained_a == of_a != of_b == trained_b


def test_sizes_with_as_many_pixels_as_in_training_but_another_shape_have_rings(by_size):
    for axes in by_size:
        rings = [part for part in axes.collections if isinstance(part, PathCollection)]
        # The image of 8 x 32 pixels has as many pixels as an image of the trained size.
        assert [[bool(size) for size in part.get_sizes()] for part in rings] == [[True, False, False], [False, True]]


def test_accuracies_alone_have_bars_of_two_standard_errors(by_size):
    lengths = []
    for axes in by_size:
        bars = [part.get_segments() for part in axes.collections if isinstance(part, LineCollection)]
        lengths.append([[np.ptp(segment[:, 1]) for segment in segments] for segments in bars])
    assert lengths == [[pytest.approx([0.015, 0.015, 0.03]), pytest.approx([0.02125, 0.04])], [], []]


def test_sizes_are_named_on_a_logarithmic_axis(by_size):
    assert {axes.get_xscale() for axes in by_size} == {"log"}
    assert [text.get_text() for text in by_size[0].get_xticklabels()] == ["8", "8 x 32, 16", "32"]
    assert [axes.get_ylabel() for axes in by_size] == ["top-1 accuracy", "loss", "calibration error"]
    assert by_size[0].figure.get_size_inches().tolist() == [15, 5.5]


def test_tables_are_drawn_whole_layer_below_layer():
    """The tables have different lengths, and the second layer lacks one table; each number has its place and colour."""
    generator = np.random.default_rng(0)
    tables = {
        "first": {"k rows": generator.normal(size=(2, 9, 4)), "b columns": generator.normal(size=(2, 9))},
        "second": {"k rows": generator.normal(size=(2, 5, 4))},
    }
    figure = plot_tables(tables, "title")
    rows, columns = figure.axes
    first, second = rows.images
    for image, table in zip(rows.images, (tables["first"]["k rows"], tables["second"]["k rows"]), strict=True):
        np.testing.assert_array_equal(image.get_array(), table.reshape(-1, 4))
        assert image.norm.vmax == -image.norm.vmin == max(abs(of["k rows"]).max() for of in tables.values())
        # The ticks are at the offset zero of each head.
        left, right, bottom, top = image.get_extent()
        heads = [top + (bottom - top) * share for share in (0.25, 0.75)]
        assert [tick for tick in rows.get_yticks() if top < tick < bottom] == pytest.approx(heads)
        assert (left, right) == (-0.5, 3.5)
    assert 0 < first.get_extent()[2] < second.get_extent()[3] < second.get_extent()[2] < rows.get_ylim()[0] == 2
    (image,) = columns.images
    np.testing.assert_array_equal(image.get_array(), tables["first"]["b columns"])
    assert tuple(image.get_extent()[:2]) == columns.get_xlim() == (-4.5, 4.5)
    assert rows.get_ylim() == columns.get_ylim()
    assert [text.get_text() for text in rows.texts] == ["first", "second"]


def test_joint_tables_are_drawn_head_beside_head():
    table = np.random.default_rng(0).normal(size=(3, 5, 7))
    (axes,) = plot_tables({"layer": {"b, joint": table}}, "title").axes
    np.testing.assert_array_equal(axes.images[0].get_array()[:, 7:14], table[1])
    assert axes.get_xlim() == (-0.5, 2.5)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["-2", "0", "2"]


def test_steps_are_drawn_over_the_shape_of_the_image(tmp_path):
    """The colours are for 1 to `most` steps, even if the image has fewer."""
    image, steps = np.full((20, 40, 3), 255, np.uint8), np.array([[1, 5, 5, 5], [5, 5, 5, 3]])
    plot_steps(image, steps, 5, tmp_path / "a.png")
    figure = pixels(tmp_path / "a.png")
    # These are the colours of viridis at both ends and in the middle; the colour bar is right of the map.
    areas = {}
    for name, colour in {"one": (68, 1, 84), "five": (253, 231, 37), "three": (33, 145, 140)}.items():
        at, across = np.nonzero((abs(figure - colour).sum(-1) < 6)[:, : 9 * figure.shape[1] // 10])
        areas[name] = (len(at), at.mean(), across.mean())
    assert areas["five"][0] == pytest.approx(6 * areas["one"][0], rel=0.05)
    assert areas["three"][0] == pytest.approx(areas["one"][0], rel=0.05)
    assert areas["one"][1] < areas["three"][1]
    assert areas["one"][2] < areas["three"][2]


def test_long_names_in_the_legend_are_not_cut_off(tmp_path, recorded):
    names = ["vit_relpos_small_patch16_rpn_224.sw_in1k", "runs/2026-11-30_15-22-35_relvit_small_kv_seed0"]
    row = {"share": 1, "knn": 0.5, "knn_se": 0.01, "linear": 0.6, "linear_se": 0.01}
    plot_probes([row] * 2, names, tmp_path / "probe.png")
    (figure,) = recorded
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert "".join(figure.legends[0].get_texts()[1].get_text().split()) == f"{names[0]},k-NN"


def test_grid_of_heights_and_widths(tmp_path, recorded):
    """Numbers are in the cells; differences below two standard errors are grey, and squares have no difference."""
    rows = []
    for height in (16, 32):
        for width in (16, 24):
            row = {"height": height, "width": width, "acc1": (height + width) / 100, "train_sizes": [[16, 24]]}
            if height != width:
                error = {"square_difference": (height - width) / 100, "square_difference_se": 0.041}
                row |= error
            rows.append(row)
    plot_size_grid(rows, ["a"] * 4, tmp_path / "a.png", "a title")
    above, below = [axes for axes in recorded[0].axes if axes.get_xlabel() == "width in pixels"]
    assert [text.get_text() for text in above.texts] == ["32.0", "40.0", "48.0", "56.0"]
    cells = {text.get_position(): (text.get_text(), text.get_color()) for text in below.texts}
    # The keys are (column, row) of each cell.
    assert cells == {(1, 0): ("-8.0", "0.55"), (0, 1): ("+16.0", "white"), (1, 1): ("+8.0", "0.55")}
    assert below.images[0].get_array().tolist() == [[None, 0], [16, 0]]
    assert [patch.get_xy() for patch in above.patches] == [(0.5, -0.5)]
