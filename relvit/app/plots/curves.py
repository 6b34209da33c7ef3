"""Draw the training curves of a run: loss, accuracy and learning rate by epoch."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from relvit.app.plots.style import SMALL, label_axes, save_figure

TRAIN, VAL = "tab:blue", "tab:orange"


def read_metrics(path: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Read the columns of a Lightning `metrics.csv` as lists of (epoch, value), without empty cells."""
    columns: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if name not in ("epoch", "step") and cell:
                    columns[name].append((int(row["epoch"]), float(cell)))
    return dict(columns)


def plot_curves(metrics: str | Path, target: str | Path, train_loss: str = "train") -> None:
    """Draw the curves of a `metrics.csv` into a PNG: loss and top-1 accuracy of training and validation, learning rate.

    For a multi-label training the figure shows mean average precision and F1 of validation instead of accuracy. Epochs
    count from 1. A dotted line marks the epoch of the best validation accuracy; if accuracies are equal, the epoch of
    the lowest loss.

    Args:
        metrics: the table, whose epochs count from 0.
        target: the PNG.
        train_loss: name of the curve of the training loss.
    """
    columns = read_metrics(metrics)
    if "val/map" in columns:
        score, scored = "val/map", "mean average precision, F1"
        of_score = {"val/map": ("val, mAP", VAL), "val/f1": ("val, mean F1", "tab:green")}
    else:
        score, scored = "val/acc1", "top-1 accuracy"
        of_score = {"train/acc1": ("train", TRAIN), "train/acc1_mixed": ("train, mixed images", TRAIN)}
        of_score["val/acc1"] = ("val", VAL)
    # `panels` maps the label of each panel to its curves: each curve's column in the table, its name and its colour.
    panels = {
        "loss": {"train/loss": (train_loss, TRAIN), "val/loss": ("val", VAL)},
        scored: of_score,
        "learning rate": {"lr": ("", TRAIN)},
    }
    # Mark the best validation by the rule by which `relvit.app.training.RunCheckpoints` chooses the best checkpoint:
    # the highest score, then the lowest loss. An epoch may have several validations, so compare validations, not
    # epochs.
    scores, losses = columns.get(score, []), columns.get("val/loss", [])
    if len(losses) != len(scores):
        # The table lacks some losses, so ignore all losses here, and mark the first of the best scores.
        losses = [(0, 0.0)] * len(scores)
    best, _ = max(zip(scores, losses, strict=True), key=lambda pair: (pair[0][1], -pair[1][1]), default=(None, None))
    # Use `Figure` without pyplot, because pyplot would keep the figure in its global state.
    figure = Figure(figsize=(15, 5.5), layout="constrained")
    for axes, (label, curves) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for column, (name, colour) in curves.items():
            if column in columns:
                epochs, values = zip(*((epoch + 1, value) for epoch, value in columns[column]), strict=True)
                marker = "o" if len(epochs) < 30 else None
                axes.plot(epochs, values, color=colour, marker=marker, markersize=4, label=name)
        if best is not None and label != "learning rate":
            text = f"best: {best[1]:.4g}, epoch {best[0] + 1}" if label == scored else None
            axes.axvline(best[0] + 1, color="black", linestyle=":", linewidth=1.5, label=text)
        label_axes(axes, "epoch", label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if label == "learning rate":
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            axes.yaxis.get_offset_text().set_fontsize(SMALL)
            axes.set_ylim(bottom=0)
        elif axes.lines:
            # Put the legend above the panel, where it covers no curve.
            axes.legend(fontsize=SMALL, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save_figure(figure, target)
