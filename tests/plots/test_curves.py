import pytest
from matplotlib.figure import Figure
from PIL import Image

from relvit.plots import plot_curves, read_metrics

METRICS = """epoch,lr,step,train/acc1,train/loss,val/acc1,val/loss
0,,9,,,0.25,2.0
0,0.1,9,0.2,2.2,,
1,,19,,,0.5,1.5
1,0.05,19,0.4,1.75,,
2,,29,,,0.5,1.6
2,0.01,29,0.5,1.5,,
"""


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """Draws a table and gives the axes of its figure."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))

    def draw(text, *arguments):
        (tmp_path / "metrics.csv").write_text(text)
        plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png", *arguments)
        return figures[-1].axes

    return draw


def curves(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_columns_by_epoch(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    columns = read_metrics(tmp_path / "metrics.csv")
    assert columns["val/acc1"] == [(0, 0.25), (1, 0.5), (2, 0.5)]
    assert columns["train/loss"] == [(0, 2.2), (1, 1.75), (2, 1.5)]


def test_three_panels_with_epochs_from_one_and_the_best_of_them(panels, tmp_path):
    loss, accuracy, rate = panels(METRICS, "train (labels smoothed by 0.1)")
    drawn = curves(loss)
    assert drawn["train (labels smoothed by 0.1)"] == ([1, 2, 3], [2.2, 1.75, 1.5])
    assert drawn["val"] == ([1, 2, 3], [2.0, 1.5, 1.6])
    # Of two that are the best that of the lower loss, as the checkpoint is.
    assert curves(accuracy)["best: 0.5, epoch 2"][0] == [2, 2]
    assert curves(accuracy)["val"] == ([1, 2, 3], [0.25, 0.5, 0.5])
    (line,) = rate.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [0.1, 0.05, 0.01])
    assert [axes.get_ylabel() for axes in (loss, accuracy, rate)] == ["loss", "top-1 accuracy", "learning rate"]
    # Half as large, letters are still legible.
    figure = loss.figure
    texts = [*loss.get_xticklabels(), loss.xaxis.label, *loss.get_legend().get_texts()]
    assert min(text.get_fontsize() for text in texts) * figure.dpi / 72 / 2 > 8
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1500, 450)


def test_an_empty_training_has_empty_panels(panels):
    assert [len(axes.lines) for axes in panels("epoch,lr,step\n")] == [0, 0, 0]
