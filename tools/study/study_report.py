"""Write tables and figures of the lines of `study.py`: `python tools/study/study_report.py [docs/study]`.

The tool writes `README.md`, `summary.png` and `curves.png` beside the folder `runs` of the lines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from study_figures import draw_curves, draw_summary
from study_lines import (
    BASE,
    FIGURES,
    OURS,
    RECIPES,
    SHOWN,
    TRAINED,
    Figure,
    Groups,
    Line,
    Runs,
    accuracies,
    at,
    difference,
    estimate,
    grouped,
    kept,
    over_sizes,
    read,
)

SOURCE = Path(__file__).parents[2] / "docs" / "study"
TITLES = {
    "resize": "`resize`, the whole image at each size (objects grow)",
    "field": "`field`, objects keep their scale (the image is continued by reflection)",
}
INTRODUCTION = """# Study: accuracy at sizes that were not trained at

Written by `python tools/study/study_report.py` from the lines of all runs in `docs/study/runs`; not to be \
edited by hand.
`python tools/study/study.py --images DIR --work WORK` trains and evaluates what is missing.

![By how much relvit is better than each other model](summary.png)

Accuracy in percent, {recipe}: the mean over seeds ± its standard error; a figure of one seed has none and says little.
All sizes: the mean over log2(size) from 16 to 64 px. [What the figures say](findings.md).

{table}
"""
CONDITIONS = """## How it was done

CIFAR-10 from a public copy whose images were stored as JPEG: figures compare with each other, not with published
ones. {images[train]:,} training images and 8 epochs, in the long trainings 50,000 and 25; {images[test]:,} test
images, in the long ones 9,800; one thread of a CPU, or a GPU ({gpu} of {runs} runs). All models with patches of 4 px
have width 128, depth 4, 4 heads, average pooling and no class token, {least:,} to {most:,} parameters, and see the
same images in the same order with the same augmentations for each seed. Trained at 20 to 44 px: each step takes one
of the sizes 20, 24 ... 44; the number of images is the same, and so there are fewer steps. Differences are those of
runs of the same seed and the same precision (bfloat16 by autocast, or float32); a seed that was trained on a CPU and
on a GPU counts once, by the mean, as both see the same images from the same start.
[The two protocols](../sizes.md) are what relative offsets are made for, `field`, and stretched embeddings, `resize`.

![Accuracy over size](curves.png)
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    head = f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def summary_table(groups: Groups) -> str:
    """Tabulate the figures of the models in SHOWN."""
    shown = [model for model in SHOWN if model in groups]
    rows = [
        [SHOWN[model], str(estimate(groups[model], over_sizes("resize")).count)]
        + [estimate(groups[model], figure).text() for figure in FIGURES.values()]
        for model in shown
    ]
    return table(["model", "seeds", *FIGURES], rows)


def difference_table(corner: str, pairs: Mapping[str, tuple[Runs, Runs]], figures: Mapping[str, Figure]) -> str:
    """Tabulate the differences of pairs of models by figure; a pair without runs of the same seed has no row."""
    rows = []
    for name, (one, other) in pairs.items():
        found = [difference(one, other, figure) for figure in figures.values()]
        if all(found):
            rows.append([name, str(found[0].count), *(value.text(sign="+") for value in found)])
    return table([corner, "pairs", *figures], rows) if rows else ""


def sizes_of(groups: Groups, protocol: str) -> list[int]:
    """Return the sizes at which the models of a recipe were evaluated."""
    return list(accuracies(next(iter(next(iter(groups.values())).values())), protocol))


def accuracy_table(groups: Groups, protocol: str) -> str:
    """Tabulate the accuracy by size, the mean over log2(size), and the share of that at 32 px kept at the largest."""
    sizes = sizes_of(groups, protocol)
    figures = [*(at(size, protocol) for size in sizes), over_sizes(protocol), kept(protocol)]
    rows = []
    for model, runs in groups.items():
        cells = [estimate(runs, figure) for figure in figures]
        rows.append([model, str(cells[0].count), *(cell.text() for cell in cells)])
    return table(["model", "seeds", *map(str, sizes), "mean over log2(size)", f"kept at {sizes[-1]}, %"], rows)


def reach_table(groups: Groups, protocol: str) -> str:
    """Tabulate the effect of `--reach`: changes by size; at the largest size the share kept and the lead over BASE."""
    rows = []
    for model, runs in groups.items():
        for reach in dict.fromkeys(row["reach"] for line in runs.values() for row in line["rows"]):
            # A line without this reach has no size but the trained one.
            tried = {key: line for key, line in runs.items() if len(accuracies(line, protocol, reach)) > 1}
            if reach == "trained" or not tried:
                continue
            sizes = [size for size in accuracies(next(iter(tried.values())), protocol, reach) if size != TRAINED]
            changes = [difference(tried, tried, at(size, protocol, reach), at(size, protocol)) for size in sizes]
            ahead = difference(tried, groups.get(BASE, {}), at(sizes[-1], protocol, reach), at(sizes[-1], protocol))
            cells = [change.text(sign="+") for change in changes]
            cells += [estimate(tried, kept(protocol, reach)).text(), ahead.text(sign="+") if ahead else ""]
            rows.append([model, reach, str(changes[0].count), *cells])
    if not rows:
        return ""
    header = ["model", "reach", "seeds", *map(str, sizes), f"kept at {sizes[-1]}, %", f"to `{BASE}` at {sizes[-1]}"]
    return table(header, rows)


def report(lines: Sequence[Line]) -> str:
    """Return the page: the summary first, then the conditions, then all tables."""
    counts = [line["parameters"] for line in lines if line["model"] in SHOWN]
    first = next(recipe for recipe in RECIPES if grouped(lines, recipe))
    short = next((line for line in lines if not line["recipe"].startswith("long")), lines[0])
    parts = [
        INTRODUCTION.format(recipe=RECIPES[first], table=summary_table(grouped(lines, first))),
        CONDITIONS.format(
            images=short["images"],
            least=min(counts),
            most=max(counts),
            gpu=sum("gpu" in line for line in lines),
            runs=len(lines),
        ),
    ]
    for recipe, trained in RECIPES.items():
        groups = grouped(lines, recipe)
        if not groups:
            continue
        parts.append(f"## {trained.capitalize()}\n")
        others = {model: (groups[OURS], runs) for model, runs in groups.items() if model != OURS and OURS in groups}
        if found := difference_table(f"`{OURS}` minus", others, FIGURES):
            parts.append(f"In points, runs of the same seed and precision:\n\n{found}")
        to_base = {model: (runs, groups.get(BASE, {})) for model, runs in groups.items() if model != BASE}
        for protocol, title in TITLES.items():
            parts += [f"### {title}\n", f"Accuracy in percent by size in pixels:\n\n{accuracy_table(groups, protocol)}"]
            figures = {str(size): at(size, protocol) for size in sizes_of(groups, protocol)}
            if found := difference_table("model", to_base, figures | {"area": over_sizes(protocol)}):
                parts.append(f"Difference to `{BASE}`, in points:\n\n{found}")
            if found := reach_table(groups, protocol):
                parts.append(f"What `--reach` changes, in points:\n\n{found}")
    hours = sum(line["processor_minutes"] for line in lines) / 60
    versions = ", ".join(f"{name} {version}" for name, version in lines[-1]["versions"].items())
    parts.append(f"{len(lines)} runs, {hours:.1f} hours of a processor for the trainings; {versions}.\n")
    return "\n".join(parts)


def main(source: Path = SOURCE) -> None:
    """Write the page and the figures into the folder that has the folder `runs`."""
    lines = read(source / "runs")
    (source / "README.md").write_text(report(lines))
    draw_summary(lines, source / "summary.png")
    draw_curves(lines, source / "curves.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
