"""Draw the accuracy of probes by the share of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from relvit.plots.curves import FONT, SMALL

PROBES = {"linear": ("linear", "-"), "knn": ("k-NN", "--")}


def plot_probes(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], target: str | Path, title: str = "") -> None:
    """Draw two curves per model into a PNG: top-1 accuracy of the linear probe and of k-NN by the share of labels.

    Args:
        rows: what `relvit.evaluation.probe_models` returns.
        labels: the name of the model of each row.
        target: the PNG.
        title: above all.
    """
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, label in enumerate(dict.fromkeys(labels)):
        own = [row for row, of in zip(rows, labels, strict=True) if of == label]
        for key, (name, style) in PROBES.items():
            # A name may hold what Matplotlib takes for a formula.
            text = f"{label}, {name}".replace("$", r"\$")
            points = [row["share"] for row in own], [row[key] for row in own]
            axes.plot(*points, style, color=f"C{number % 10}", marker="o", label=text)
    shares = sorted({row["share"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:.3g}" for share in shares])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("share of the labels of train", fontsize=FONT)
    axes.set_ylabel("top-1 accuracy", fontsize=FONT)
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=SMALL)
    figure.suptitle(title, fontsize=FONT)
    figure.savefig(target, dpi=100)
