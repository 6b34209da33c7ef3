"""Draw the training curves of a run: loss, accuracy and learning rate by epoch."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Columns of a quantity in each panel, and what its axis is called.
PANELS = (("loss", "loss"), ("acc1", "top-1 accuracy"), ("map", "mean average precision, F1"), ("lr", "learning rate"))
# Legible where the figure is shown at half its size.
FONT, SMALL = 15, 13
TRAIN, VAL = "tab:blue", "tab:orange"


def read_metrics(path: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Read the columns of a Lightning `metrics.csv` as lists of (epoch, value), without empty cells."""
    columns: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if name not in ("epoch", "step") and cell:
                    columns[name].append((int(row["epoch"]), float(cell)))
    return dict(columns)


def plot_curves(metrics: str | Path, target: str | Path, train_loss: str = "train") -> None:
    """Draw the curves of a `metrics.csv` into a PNG: loss and top-1 accuracy of training and validation, learning rate.

    Of a multi-label training mean average precision and F1 of validation take the place of accuracy. Epochs count from
    1. A dotted line marks the epoch of the best validation accuracy, of several that of the lowest loss.

    Args:
        metrics: the table, whose epochs count from 0.
        target: the PNG.
        train_loss: what the curve of the training loss is called.
    """
    columns = read_metrics(metrics)
    lines = {
        "loss": [("train/loss", train_loss, TRAIN), ("val/loss", "val", VAL)],
        "acc1": [
            ("train/acc1", "train", TRAIN),
            ("train/acc1_mixed", "train, mixed images", TRAIN),
            ("val/acc1", "val", VAL),
        ],
        "map": [("val/map", "val, mAP", VAL), ("val/f1", "val, mean F1", "tab:green")],
        "lr": [("lr", "", TRAIN)],
    }
    score = "map" if "val/map" in columns else "acc1"
    # The figure class itself instead of pyplot: no global state, no display, no threads.
    figure = Figure(figsize=(15, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    # The best checkpoint as `relvit.training.RunCheckpoints` chooses it.
    scores, losses = columns.get(f"val/{score}", []), columns.get("val/loss", [])
    if len(losses) != len(scores):
        losses = [(0, 0.0)] * len(scores)
    # Row by row: an epoch may have several validations.
    pairs = zip(scores, losses, strict=True)
    best, _ = max(pairs, key=lambda pair: (pair[0][1], -pair[1][1]), default=(None, None))
    panels = [panel for panel in PANELS if panel[0] in ("loss", score, "lr")]
    for axes, (quantity, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for column, name, colour in lines[quantity]:
            _draw(axes, columns.get(column, []), name, colour)
        if best is not None and quantity != "lr":
            text = f"best: {best[1]:.4g}, epoch {best[0] + 1}" if quantity == score else None
            axes.axvline(best[0] + 1, color="black", linestyle=":", linewidth=1.5, label=text)
        axes.set_xlabel("epoch", fontsize=FONT)
        axes.set_ylabel(label, fontsize=FONT)
        axes.tick_params(labelsize=SMALL)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.3)
        if quantity == "lr":
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            axes.yaxis.get_offset_text().set_fontsize(SMALL)
            axes.set_ylim(bottom=0)
        elif axes.lines:
            # Above the panel: there are too few points to leave room for it between curves.
            axes.legend(fontsize=SMALL, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(target, dpi=100)


def _draw(axes: Axes, points: list[tuple[int, float]], name: str, colour: str) -> None:
    if points:
        epochs, values = zip(*points, strict=True)
        marker = "o" if len(points) < 30 else None
        axes.plot([epoch + 1 for epoch in epochs], values, color=colour, marker=marker, markersize=4, label=name)
