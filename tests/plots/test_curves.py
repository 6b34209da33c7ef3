import numpy as np
from PIL import Image

from relvit.plots import plot_curves, read_metrics

METRICS = """epoch,lr,step,train/acc1,train/loss,val/acc1,val/loss
0,,9,,,0.25,2.0
0,0.1,9,0.2,2.2,,
1,,19,,,0.5,1.5
1,0.05,19,0.4,1.75,,
"""


def test_columns_by_epoch(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    columns = read_metrics(tmp_path / "metrics.csv")
    assert columns["val/acc1"] == [(0, 0.25), (1, 0.5)]
    assert columns["train/loss"] == [(0, 2.2), (1, 1.75)]


def test_figure_shows_lines_and_an_empty_training_gives_an_empty_one(tmp_path):
    def ink(text):
        (tmp_path / "metrics.csv").write_text(text)
        plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
        with Image.open(tmp_path / "curves.png") as figure:
            pixels = np.asarray(figure.convert("RGB")).astype(int)
        return int((pixels.max(-1) - pixels.min(-1) > 50).sum())  # coloured, as only lines are

    assert ink(METRICS) > 500
    assert ink("epoch,lr,step\n") == 0
