"""Draw the lines of `study.py`: `summary.png`, our model against each other one, and `curves.png`, all sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from study_lines import (
    FIGURES,
    OURS,
    PROTOCOLS,
    RECIPES,
    SHOWN,
    TRAINED,
    Line,
    accuracies,
    at,
    difference,
    estimate,
    grouped,
)

# The figure has the curves of these recipes, whose models have patches of 4 px.
DRAWN = ("one", "several", "long")


def draw_summary(lines: Sequence[Line], target: Path) -> None:
    """Draw by how much our model is better than each other model: three dots with bars of two standard errors."""
    groups = grouped(lines, "one")
    ours = groups.get(OURS, {})
    # A model is comparable if one of its runs has the seed and the precision of a run of ours.
    others = [model for model in SHOWN if model != OURS and ours.keys() & groups.get(model, {}).keys()]
    figure = Figure(figsize=(9, 1.5 + 0.6 * len(others)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(list(FIGURES)[:3]):
        for row, model in enumerate(others):
            found = difference(ours, groups[model], FIGURES[name])
            assert found is not None
            error = 0 if math.isnan(found.error) else 2 * found.error
            label = name.replace("`", "") if row == 0 else None
            place = row + 0.2 * (number - 1)
            axes.errorbar(found.mean, place, xerr=error, fmt="o", color=f"C{number}", capsize=3, label=label)
    axes.axvline(0, color="grey")
    axes.set_yticks(range(len(others)), [SHOWN[model] for model in others])
    axes.invert_yaxis()
    axes.set_xlabel("points of accuracy by which relvit (kv, max_distance 2, and learned) is better")
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside upper center", ncols=3, title=f"{RECIPES['one']}; bars: two standard errors")
    with rc_context({"font.size": 12}):
        figure.savefig(target, dpi=90, metadata={"Software": None})


def draw_curves(lines: Sequence[Line], target: Path) -> None:
    """Draw accuracy over size, one panel for each recipe and protocol, with standard errors."""
    figure = Figure(figsize=(13, 14), layout="constrained")
    axes = figure.subplots(len(DRAWN), len(PROTOCOLS), sharey="row", squeeze=False)
    for row, recipe in zip(axes, DRAWN, strict=True):
        groups = grouped(lines, recipe)
        for panel, protocol in zip(row, PROTOCOLS, strict=True):
            for number, (model, label) in enumerate(SHOWN.items()):
                if model not in groups:
                    continue
                runs = groups[model]
                sizes = list(accuracies(next(iter(runs.values())), protocol))
                points = [estimate(runs, at(size, protocol)) for size in sizes]
                errors = [0 if math.isnan(point.error) else point.error for point in points]
                style = "-" if points[0].count > 1 else "--"
                look = {"color": f"C{number}", "linestyle": style, "marker": "o", "capsize": 3}
                panel.errorbar(sizes, [point.mean for point in points], errors, label=label, **look)
            panel.axvline(TRAINED, color="grey", linestyle=":")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_locator(FixedLocator([16, 24, 32, 40, 48, 64]))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.set_title(f"{protocol}; {RECIPES[recipe]}")
            panel.set_xlabel("size in pixels")
            panel.set_ylabel("top-1 accuracy, %")
            panel.grid(alpha=0.3)
    panels = (panel.get_legend_handles_labels() for panel in axes.flat)
    handles = {label: handle for part in panels for handle, label in zip(*part, strict=True)}
    # The legend has each model once, in the order of SHOWN.
    names = [name for name in SHOWN.values() if name in handles]
    shown = [handles[name] for name in names]
    figure.legend(shown, names, loc="outside lower center", ncols=3, title="model; dashed: one seed")
    with rc_context({"font.size": 13}):
        figure.savefig(target, dpi=70, metadata={"Software": None})
