"""Tabulate the lines of `study.py` in Markdown: figures of models, differences of paired runs, effects of `--reach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from study_lines import (
    BASE,
    TRAINED,
    Figure,
    Groups,
    accuracies,
    at,
    difference,
    estimate,
    kept,
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    head = f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def figures_table(groups: Groups, figures: Mapping[str, Figure]) -> str:
    """Tabulate the figures of BASE, and by how much other models are above them in runs of the same seed.

    A model without a run of the same seed is shown by its own figures, in percent.
    """
    rows = []
    for model, runs in groups.items():
        pairs = [model != BASE and difference(runs, groups.get(BASE, {}), figure) for figure in figures.values()]
        if all(pairs):
            rows.append([model, str(pairs[0].count), *(found.text("+") for found in pairs)])
        else:
            values = [estimate(runs, figure) for figure in figures.values()]
            rows.append([model, str(values[0].count), *(f"{found.text()} %" for found in values)])
    return table(["model", "seeds", *figures], sorted(rows, key=lambda row: row[0] != BASE))


def reach_table(groups: Groups, protocol: str) -> str:
    """Tabulate the effect of `--reach`: changes by size; at the largest size the share kept and the lead over BASE."""
    rows = []
    for model, runs in groups.items():
        for reach in dict.fromkeys(row["reach"] for line in runs.values() for row in line["rows"]):
            # A line without this reach has an accuracy at the trained size only.
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
