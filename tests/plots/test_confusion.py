"""Pixels of the confusion matrix and the sheet."""

import numpy as np
import pytest
from PIL import Image

from relvit.plots import plot_confusion, plot_sheet


def ink(path):
    """The figure as darkness, float (H, W) in 0..1."""
    with Image.open(path) as figure:
        return 1 - np.asarray(figure.convert("L")).astype(float) / 255


@pytest.mark.parametrize("classes", [2, 20, 1000])
def test_every_class_has_its_pixels(classes, tmp_path):
    drawn = []
    for confusion in (np.eye(classes, dtype=int), np.zeros((classes, classes), int)):
        plot_confusion(confusion, [f"$na_me$ {i}" for i in range(classes)], tmp_path / "a.png")
        drawn.append(ink(tmp_path / "a.png"))
    # where they differ is the diagonal: in every row of pixels, and further right in each
    rows, columns = np.nonzero(drawn[0] != drawn[1])
    different = np.unique(rows)
    assert len(different) == np.ptp(rows) + 1 >= classes
    means = [columns[rows == row].mean() for row in different[:: len(different) // 50 or 1]]
    assert (np.diff(means) >= 0).all()
    assert 600 <= drawn[0].shape[1] <= 1800
    assert (tmp_path / "a.png").stat().st_size < 2_000_000


def test_columns_are_predictions_and_colours_shares_of_rows(tmp_path):
    plot_confusion(np.array([[0, 30], [0, 0]]), ["a", "b"], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as figure:
        pixels = np.asarray(figure.convert("RGB")).astype(int)
    # Matplotlib's darkest of "Blues"; the colour bar is right of the axes
    rows, columns = np.nonzero((abs(pixels - (8, 48, 107)).sum(-1) < 6)[:, :400])
    height, width = pixels.shape[:2]
    assert len(rows) > 5000
    assert rows.max() < 0.5 * height
    assert columns.min() > 0.3 * width


def test_names_and_counts_only_where_they_can_be_read(tmp_path):
    def drawn(classes, name):
        plot_confusion(np.eye(classes, dtype=int), [name] * classes, tmp_path / "a.png")
        return ink(tmp_path / "a.png")

    # other names change the figure up to 60 classes, not beyond
    assert (drawn(60, "x") != drawn(60, "y")).any()
    assert (drawn(61, "x") == drawn(61, "y")).all()


def test_sheet(tmp_path):
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200), (200, 0, 200)]
    images = [np.full((4 + i, 9 - i, 3), colour, np.uint8) for i, colour in enumerate(colours)]
    plot_sheet(images, [f"a$b\nline {i}" for i in range(6)], tmp_path / "sheet.png", "title")
    with Image.open(tmp_path / "sheet.png") as figure:
        pixels = np.asarray(figure.convert("RGB")).astype(int)
    centres = []
    for image, colour in zip(images, colours, strict=True):
        rows, columns = np.nonzero(abs(pixels - colour).sum(-1) < 10)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert height / width == pytest.approx(image.shape[0] / image.shape[1], rel=0.05)
        centres.append((rows.mean(), columns.mean()))
    assert [column for _, column in centres[:5]] == sorted(column for _, column in centres[:5])
    assert centres[5][0] > max(row for row, _ in centres[:5])
    assert centres[5][1] == pytest.approx(centres[0][1], abs=15)
