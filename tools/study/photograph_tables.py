"""Print tables of the lines of `photographs.py`: `python tools/study/photograph_tables.py imagenette [FOLDER]`.

FOLDER contains the lines, by default docs/study/photographs. Figures with % are accuracies; other figures are
differences in points between runs of the same seed. Both are means over seeds ± standard errors; a single seed has no
standard error.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import sub
from pathlib import Path
from typing import Any

from photographs import LINES
from study_lines import Estimate, read
from study_tables import table

Line = dict[str, Any]
# Accuracies in percent by seed, for each part, model with its reach, and test.
Accuracies = dict[str, dict[str, dict[str, dict[int, float]]]]
BASES = ("learned", "plain")


def accuracies(lines: Sequence[Line]) -> Accuracies:
    """Collect the accuracies of all seeds; where a reach has no effect, its accuracies are those of 'trained'."""
    found: Accuracies = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for line in lines:
        of_part = found[f"{line['part']}, {line['epochs']}"]
        for reach in dict.fromkeys(row["reach"] for row in line["rows"]):
            model = line["model"] + ("" if reach == "trained" else f", {reach}")
            for row in line["rows"]:
                if row["reach"] in ("trained", reach):
                    test = f"{row['protocol']} {' x '.join(map(str, row['size']))}"
                    of_part[model][test][line["seed"]] = 100 * row["acc1"]
    return found


def text(seeds: dict[int, float], sign: str = "") -> str:
    """Write the mean over seeds ± its standard error; nothing without a seed."""
    return Estimate.of({(seed, ""): value for seed, value in seeds.items()}).text(sign) if seeds else ""


def pairs(one: dict[int, float], other: dict[int, float], figure: Callable[[float, float], float]) -> dict[int, float]:
    """Apply `figure` to the two values of each seed that is in both dictionaries."""
    return {seed: figure(value, other[seed]) for seed, value in one.items() if seed in other}


def tables(lines: Sequence[Line]) -> str:
    """Tabulate the parts that have the same tests: accuracies without relative positions, and differences to them.

    A model without a run of the same seed is shown by its accuracies. The table of growing fields also has the accuracy
    at the last size in percent of the accuracy at the first size, which is the trained one.
    """
    found: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for part, models in accuracies(lines).items():
        base = next((models[name] for name in BASES if name in models), {})
        tests = list(next(iter(models.values())))
        last = [f"kept at {tests[-1]}, %"] if part.startswith("field") else []
        rows = found["training, epochs", "model", "seeds", *tests, *last]
        for model, curve in sorted(models.items(), key=lambda item: item[1] is not base):
            share = [text(pairs(curve[tests[-1]], curve[tests[0]], lambda a, b: 100 * a / b)) for _ in last]
            if curve is not base and (both := pairs(curve[tests[0]], base.get(tests[0], {}), sub)):
                cells = [text(pairs(curve[test], base[test], sub), "+") for test in tests]
                rows.append([part, model, str(len(both)), *cells, *share])
            else:
                cells = [f"{text(curve[test])} %" for test in tests]
                rows.append([part, model, str(len(curve[tests[0]])), *cells, *share])
    return "\n".join(table(header, rows) for header, rows in found.items())


def main(arguments: Sequence[str]) -> None:
    """Print the tables of a setting."""
    setting, *folder = arguments
    lines = [line for line in read(Path(*folder) if folder else LINES) if line["setting"] == setting]
    print(tables(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
