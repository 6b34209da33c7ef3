"""Write tables and figures of the lines of `study.py`: `python tools/study/study_report.py [results.jsonl]`.

`README.md` and `curves.png` are written beside the file.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

Line = dict[str, Any]
SOURCE = Path(__file__).parents[2] / "docs" / "study" / "results.jsonl"
BASE = "learned"
TRAINED = 32
PROTOCOLS = {
    "resize": "`resize`, the whole image at each size (objects grow)",
    "field": "`field`, objects keep their scale (the image is continued by reflection)",
}
RECIPES = {"one": "trained at 32 px", "several": "trained at 20 to 44 px"}
# In this order, as far as they have lines; the figures show those that are named here.
SHOWN = {
    "learned": "learned absolute",
    "rope-mixed": "mixed RoPE",
    "relpos": "timm's relpos bias",
    "kv-3-start-0.1": "kv, max_distance 3",
    "kv-7-start-0.1": "kv, max_distance 7",
    "kv-2-start-0.1": "kv, max_distance 2",
    "kv-2-learned-start-0.1": "kv, max_distance 2, and learned",
    "aft-conv": "AFT-conv",
    "none": "no positions",
}
INTRODUCTION = """# Study: accuracy at sizes that were not trained at

Written by `python tools/study/study_report.py` from the [lines of all runs](results.jsonl); not to be edited by hand.
`python tools/study/study.py --images DIR --work WORK` trains and evaluates what is missing.

CIFAR-10 from a public copy whose images were stored as JPEG: figures compare with each other, not with published ones.
{images[train]:,} training images, {images[test]:,} test images, {epochs} epochs, bfloat16, one thread. All models:
width 128, depth 4, 4 heads, patch 4, average pooling, no class token, {least:,} to {most:,} parameters; the same images
in the same order with the same augmentations for each seed. Trained at 20 to 44 px: one of the sizes 20, 24 ... 44
for each step, the same number of images in all, and so fewer steps. Each accuracy is the mean over seeds, ± its
standard error where there are two seeds or more; a difference of one seed alone says little.
[The two protocols](../sizes.md) are what relative offsets are made for, `field`, and stretched embeddings, `resize`;
[what the figures say](findings.md).
"""


class Estimate(NamedTuple):
    """Mean, its standard error (NaN for one value) and the number of values."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        count = len(values)
        return cls(mean(values), stdev(values) / math.sqrt(count) if count > 1 else math.nan, count)

    def text(self, digits: int = 1, sign: str = "") -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{error}"


def accuracies(line: Line, protocol: str, reach: str = "trained") -> dict[int, float]:
    """Return accuracy in percent by size, at other reaches than 'trained' for the sizes that have it."""
    rows = {(row["reach"], row["protocol"], row["size"]): 100 * row["acc1"] for row in line["rows"]}
    # At the trained size protocols and reaches do not differ; it has one row.
    at_trained = rows["trained", "resize", TRAINED]
    found = {size: value for (kind, name, size), value in rows.items() if (kind, name) == (reach, protocol)}
    return dict(sorted((found | {TRAINED: at_trained}).items()))


def area(curve: dict[int, float]) -> float:
    """Return the mean height of a curve over log2(size), by trapezoids."""
    octaves = np.log2(list(curve))
    return float(np.trapezoid(list(curve.values()), octaves) / (octaves[-1] - octaves[0]))


def grouped(lines: Sequence[Line], recipe: str) -> dict[str, dict[int, Line]]:
    """Return lines of a recipe by model and seed, models in the order of SHOWN."""
    groups: dict[str, dict[int, Line]] = defaultdict(dict)
    for line in lines:
        if line["recipe"] == recipe:
            groups[line["model"]][line["seed"]] = line
    order = [*SHOWN, *groups]
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0])))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    head = f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def accuracy_table(groups: dict[str, dict[int, Line]], protocol: str) -> str:
    """Tabulate the accuracy by size, the mean over log2(size), and what is kept at 64 px of that at 32 px."""
    rows = []
    for model, seeds in groups.items():
        curves = [accuracies(line, protocol) for line in seeds.values()]
        sizes = list(curves[0])
        cells = [Estimate.of([curve[size] for curve in curves]).text() for size in sizes]
        kept = Estimate.of([100 * curve[sizes[-1]] / curve[TRAINED] for curve in curves])
        rows.append(
            [model, str(len(seeds)), *cells, Estimate.of([area(curve) for curve in curves]).text(), kept.text()]
        )
    return table(["model", "seeds", *map(str, sizes), "mean over log2(size)", f"kept at {sizes[-1]}, %"], rows)


def differences(groups: dict[str, dict[int, Line]], protocol: str) -> dict[str, dict[str, Estimate]]:
    """Return the difference to BASE of the same seed, by model and size or 'area'."""
    found = {}
    for model, seeds in groups.items():
        pairs = [
            (accuracies(line, protocol), accuracies(groups[BASE][seed], protocol))
            for seed, line in seeds.items()
            if seed in groups.get(BASE, {})
        ]
        if model == BASE or not pairs:
            continue
        found[model] = {str(size): Estimate.of([own[size] - base[size] for own, base in pairs]) for size in pairs[0][0]}
        found[model]["area"] = Estimate.of([area(own) - area(base) for own, base in pairs])
    return found


def difference_table(found: dict[str, dict[str, Estimate]]) -> str:
    """Tabulate paired differences."""
    names = next(iter(found.values()))
    rows = [
        [model, str(next(iter(row.values())).count), *(value.text(sign="+") for value in row.values())]
        for model, row in found.items()
    ]
    return table(["model", "pairs", *names], rows)


def reach_table(groups: dict[str, dict[int, Line]], protocol: str) -> str:
    """Tabulate what `--reach` changes, paired with 'trained', and at the largest size what is then kept, and BASE's."""
    rows = []
    for model, seeds in groups.items():
        for reach in dict.fromkeys(row["reach"] for line in seeds.values() for row in line["rows"]):
            if reach == "trained":
                continue
            # A line without this reach has no size but the trained one.
            tried = [line for line in seeds.values() if len(accuracies(line, protocol, reach)) > 1]
            if not tried:
                continue
            pairs = [(accuracies(line, protocol, reach), accuracies(line, protocol)) for line in tried]
            sizes = [size for size in pairs[0][0] if size != TRAINED]
            changes = [Estimate.of([own[size] - base[size] for own, base in pairs]).text(sign="+") for size in sizes]
            largest = sizes[-1]
            kept = Estimate.of([100 * own[largest] / own[TRAINED] for own, _ in pairs]).text()
            others = [(line, groups[BASE][line["seed"]]) for line in tried if line["seed"] in groups.get(BASE, {})]
            ahead = [
                accuracies(line, protocol, reach)[largest] - accuracies(other, protocol)[largest]
                for line, other in others
            ]
            rows.append(
                [model, reach, str(len(pairs)), *changes, kept, Estimate.of(ahead).text(sign="+") if ahead else ""]
            )
    if not rows:
        return ""
    return table(
        ["model", "reach", "seeds", *map(str, sizes), f"kept at {largest}, %", f"to `{BASE}` at {largest}"], rows
    )


def draw(lines: Sequence[Line], target: Path) -> None:
    """Draw accuracy over size, one panel for each recipe and protocol, with standard errors."""
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    axes = figure.subplots(len(RECIPES), len(PROTOCOLS), sharey=True, squeeze=False)
    for row, (recipe, trained) in zip(axes, RECIPES.items(), strict=True):
        groups = grouped(lines, recipe)
        for panel, protocol in zip(row, PROTOCOLS, strict=True):
            for number, (model, label) in enumerate(SHOWN.items()):
                if model not in groups:
                    continue
                curves = [accuracies(line, protocol) for line in groups[model].values()]
                points = {size: Estimate.of([curve[size] for curve in curves]) for size in curves[0]}
                errors = [0 if math.isnan(point.error) else point.error for point in points.values()]
                means = [point.mean for point in points.values()]
                style = "-" if len(curves) > 1 else "--"
                look = {"color": f"C{number}", "linestyle": style, "marker": "o", "capsize": 3}
                panel.errorbar(list(points), means, errors, label=label, **look)
            panel.axvline(TRAINED, color="grey", linestyle=":")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_locator(FixedLocator([16, 24, 32, 40, 48, 64]))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.set_title(f"{protocol}, {trained}")
            panel.set_xlabel("size in pixels")
            panel.set_ylabel("top-1 accuracy, %")
            panel.grid(alpha=0.3)
    panels = (panel.get_legend_handles_labels() for panel in axes.flat)
    handles = {label: handle for part in panels for handle, label in zip(*part, strict=True)}
    # Each model once, in the order of SHOWN.
    names = [name for name in SHOWN.values() if name in handles]
    shown = [handles[name] for name in names]
    figure.legend(shown, names, loc="outside lower center", ncols=3, title="model; dashed: one seed")
    with rc_context({"font.size": 13}):
        figure.savefig(target, dpi=80, metadata={"Software": None})


def report(lines: Sequence[Line]) -> str:
    """Write the page of the runs whose recipe it describes."""
    lines = [line for line in lines if line["recipe"] in RECIPES]
    counts = [line["parameters"] for line in lines]
    epochs = next(option.partition("=")[2] for option in lines[0]["options"] if "max_epochs" in option)
    introduction = INTRODUCTION.format(images=lines[0]["images"], epochs=epochs, least=min(counts), most=max(counts))
    parts = [introduction, "![Accuracy over size](curves.png)\n"]
    for recipe, trained in RECIPES.items():
        groups = grouped(lines, recipe)
        if not groups:
            continue
        parts.append(f"## {trained.capitalize()}\n")
        for protocol, title in PROTOCOLS.items():
            parts += [f"### {title}\n", f"Accuracy in percent by size in pixels:\n\n{accuracy_table(groups, protocol)}"]
            if found := differences(groups, protocol):
                parts.append(f"Difference to `{BASE}` of the same seed, in points:\n\n{difference_table(found)}")
            if found := reach_table(groups, protocol):
                parts.append(f"What `--reach` changes, in points:\n\n{found}")
    minutes = sum(line["processor_minutes"] for line in lines) / 60
    versions = ", ".join(f"{name} {version}" for name, version in lines[-1]["versions"].items())
    parts.append(f"{len(lines)} runs, {minutes:.1f} hours of a processor for the trainings; {versions}.\n")
    return "\n".join(parts)


def main(source: Path = SOURCE) -> None:
    """Write the page and the figure beside the lines."""
    lines = [json.loads(line) for line in source.read_text().splitlines() if line]
    (source.parent / "README.md").write_text(report(lines))
    draw(lines, source.parent / "curves.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
