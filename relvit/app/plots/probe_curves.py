"""Draw the accuracy of linear and k-NN probes by the share of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from relvit.app.plots.style import label_axes, literal, save_with_legend

PROBES = {"linear": ("linear", "-"), "knn": ("k-NN", "--")}


def plot_probes(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], target: str | Path, title: str = "") -> None:
    """Draw two curves per model into a PNG: top-1 accuracy of the linear probe and of k-NN by the share of labels.

    Error bars show standard errors.

    Args:
        rows: the rows that `relvit.app.evaluation.probe_models` returns.
        labels: the name of the model of each row.
        target: the PNG.
        title: title of the figure.
    """
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots()
    for number, label in enumerate(dict.fromkeys(labels)):
        own = [row for row, of in zip(rows, labels, strict=True) if of == label]
        for key, (name, style) in PROBES.items():
            points = [row["share"] for row in own], [row[key] for row in own], [row[f"{key}_se"] for row in own]
            axes.errorbar(*points, fmt=f"o{style}", color=f"C{number % 10}", label=literal(f"{label}, {name}"))
    shares = sorted({row["share"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:.3g}" for share in shares])
    label_axes(axes, "share of the labels of train", "top-1 accuracy")
    save_with_legend(figure, title, target)
