"""Metrics of the classes as a short table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from relvit.evaluation import ClassMetrics

# All classes up to so many, else the worst few.
ALL, WORST = 20, 10


def show_classes(metrics: ClassMetrics, class_names: Sequence[str]) -> None:
    """Print a row for each class; of more than 20 the ten with the lowest F1 among those that have images."""
    rows = np.arange(len(class_names))
    title = None
    if len(rows) > ALL:
        known = rows[metrics.count > 0]
        rows = known[np.argsort(metrics.f1[known], kind="stable")][:WORST]
        title = f"the {len(rows)} classes with the lowest F1 of {len(class_names)}"
    table = Table(title=title, title_justify="left")
    for name in ("class", *ClassMetrics._fields):
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in rows:
        values = ("-" if np.isnan(column[row]) else f"{column[row]:.4f}" for column in metrics[1:])
        table.add_row(class_names[row], str(metrics.count[row]), *values)
    # No markup: names may hold brackets.
    Console(highlight=False, markup=False).print(table)
