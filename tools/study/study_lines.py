"""Read the lines of `study.py`: accuracies by size and over all sizes, standard errors, differences of paired runs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

Line = dict[str, Any]
# The seed and the precision of a run: runs with the same key are compared, on whatever device they were trained.
Key = tuple[int, str]
Runs = dict[Key, Line]
Groups = dict[str, Runs]
# A `Figure` computes the number of a run by which models are compared.
Figure = Callable[[Line], float]

BASE = "learned"
OURS = "kv-2-learned-start-0.1"
TRAINED = 32
# The names of models with patches of 2 px have this ending.
PATCH_2 = "-patch-2"
PROTOCOLS = ("resize", "field")
RECIPES = {
    "one": "8 epochs, trained at 32 px",
    "muon": "8 epochs by Muon, trained at 32 px",
    "several": "8 epochs, trained at 20 to 44 px",
    "long": "25 epochs of all images, trained at 32 px",
    "long-several": "25 epochs of all images, trained at 20 to 44 px",
    "one, patches of 2 px": "8 epochs, trained at 32 px, patches of 2 px: a grid of 16 x 16",
}
# Figures and the first tables show these models in this order; the other models come behind them in every table.
SHOWN = {
    OURS: "kv, max_distance 2, and learned",
    "v-2-learned-start-0.1": "v, max_distance 2, and learned",
    "kv-2-start-0.1": "kv, max_distance 2",
    "learned": "learned absolute",
    "pape-learned": "PaPE and learned",
    "lookhere-180": "LookHere",
    "fire-learned": "FIRE and learned",
    "rope-mixed-learned": "mixed RoPE and learned",
    "relpos": "timm's relpos bias",
    "aft-conv": "AFT-conv",
}


def read(folder: Path) -> list[Line]:
    """Read the lines of all files in a folder."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


class Estimate(NamedTuple):
    """Mean, its standard error (NaN for one value) and the number of values."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, runs: Mapping[Key, float]) -> Estimate:
        """Estimate from a value for each run: runs of one seed in two precisions count as one, by their mean."""
        seeds: dict[int, list[float]] = defaultdict(list)
        for (seed, _), value in runs.items():
            seeds[seed].append(value)
        values = [mean(of_seed) for of_seed in seeds.values()]
        count = len(values)
        return cls(mean(values), stdev(values) / math.sqrt(count) if count > 1 else math.nan, count)

    def text(self, sign: str = "") -> str:
        """Write mean ± standard error, where there is one."""
        error = "" if math.isnan(self.error) else f" ± {self.error:.1f}"
        return f"{self.mean:{sign}.1f}{error}"


def accuracies(line: Line, protocol: str, reach: str = "trained") -> dict[int, float]:
    """Return accuracy in percent by size, at other reaches than 'trained' for the sizes that have it."""
    rows = {(row["reach"], row["protocol"], row["size"]): 100 * row["acc1"] for row in line["rows"]}
    # At the trained size, all protocols and reaches give the same result, which is in one row.
    at_trained = rows["trained", "resize", TRAINED]
    found = {size: value for (kind, name, size), value in rows.items() if (kind, name) == (reach, protocol)}
    return dict(sorted((found | {TRAINED: at_trained}).items()))


def at(size: int, protocol: str, reach: str = "trained") -> Figure:
    """Return the function from a line to its accuracy at a size."""
    return lambda line: accuracies(line, protocol, reach)[size]


def over_sizes(protocol: str) -> Figure:
    """Return the function from a line to its mean accuracy over log2(size)."""
    return lambda line: area(accuracies(line, protocol))


def area(curve: dict[int, float]) -> float:
    """Return the mean height of a curve over log2(size), by trapezoids."""
    octaves = np.log2(list(curve))
    return float(np.trapezoid(list(curve.values()), octaves) / (octaves[-1] - octaves[0]))


def kept(protocol: str, reach: str = "trained") -> Figure:
    """Return the function from a line to its accuracy at the largest size, in percent of that at the trained size."""

    def share(line: Line) -> float:
        curve = accuracies(line, protocol, reach)
        return 100 * curve[max(curve)] / curve[TRAINED]

    return share


# Models are compared by these figures: at the trained size, over all sizes, at the largest size.
FIGURES: dict[str, Figure] = {
    "at 32 px": at(TRAINED, "resize"),
    "all sizes, `resize`": over_sizes("resize"),
    "all sizes, `field`": over_sizes("field"),
    "64 px, `resize`": at(64, "resize"),
    "64 px, `field`": at(64, "field"),
}


def grouped(lines: Sequence[Line], recipe: str) -> Groups:
    """Return lines of a recipe by model and by seed and precision, models in the order of SHOWN."""
    runs: dict[str, dict[Key, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        model, of = line["model"].removesuffix(PATCH_2), line["recipe"]
        if (of if model == line["model"] else f"{of}, patches of 2 px") == recipe:
            precision = next(option for option in line["options"] if "precision" in option)
            runs[model][line["seed"], precision].append(line)
    order = [*SHOWN, *runs]
    groups = {model: {key: merged(several) for key, several in of_model.items()} for model, of_model in runs.items()}
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0])))


def merged(lines: Sequence[Line]) -> Line:
    """Return one line whose accuracies are the means of lines of one seed, such as a CPU's and a GPU's."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for line in lines:
        for row in line["rows"]:
            found[row["reach"], row["protocol"], row["size"]].append(row["acc1"])
    names = ("reach", "protocol", "size")
    rows = [dict(zip(names, place, strict=True)) | {"acc1": mean(values)} for place, values in found.items()]
    return lines[0] | {"rows": rows}


def estimate(runs: Runs, figure: Figure) -> Estimate:
    """Estimate a figure from the runs of a model."""
    return Estimate.of({key: figure(line) for key, line in runs.items()})


def difference(one: Runs, other: Runs, figure: Figure, of_other: Figure | None = None) -> Estimate | None:
    """Estimate `one` minus `other` from pairs of runs of the same seed and precision; None: there is no pair.

    Runs of one seed see the same images in the same order, so their difference varies less than the difference of two
    means. Unless `of_other` is given, the same figure is computed for `other`.
    """
    of_other = of_other or figure
    pairs = {key: figure(line) - of_other(other[key]) for key, line in one.items() if key in other}
    return Estimate.of(pairs) if pairs else None
