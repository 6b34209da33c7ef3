"""Answer users' questions by the study, each by a table and a figure: own size, other sizes, a trained model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from photograph_tables import Accuracies, accuracies, pairs, text
from study_lines import BASE, TRAINED, Estimate, Key, Line, at, grouped
from study_tables import table

# `Values` maps each run of a model to its accuracy in percent.
Values = dict[Key, float]
# Models of the study on CIFAR-10 and of the study on photographs, by their names in tables and figures.
MODELS = {
    "kv, `max_distance` 2, and learned": ("kv-2-learned-start-0.1", "kv-2-learned"),
    "kv, `max_distance` 4, and learned": ("kv-4-learned", "kv-4-learned"),
    "learned alone": (BASE, "learned"),
    "PaPE and learned": ("pape-learned", "pape-learned"),
    "LookHere": ("lookhere-180", "lookhere"),
    "LookHere and kv, `max_distance` 2": ("kv-2-lookhere", "kv-2-lookhere"),
    # Of these two positions there are other runs in the tables of all runs, with a start that slows short trainings.
    "mixed RoPE and learned": ("rope-mixed-learned-vit-start", "rope-mixed-learned-vit-start"),
    "timm's relpos bias": ("relpos-vit-start", "relpos-vit-start"),
}
ALONE = "learned alone"
RECIPES = {
    "CIFAR-10, 8 x 8 patches, 8 epochs": "one",
    "the same, 25 epochs": "long",
    "8 epochs by Muon": "muon",
    "CIFAR-10, 16 x 16, 8 epochs": "one, patches of 2 px",
}
PHOTOGRAPHS = "Imagenette, 14 x 14, 20 epochs"
SCRATCH, FIELD = "scratch, 20", "field, 20"
SIDES, FIELDS = (80, 96, 112, 144, 176, 224), (112, 128, 144, 160)
# The kinds of fine-tuning of a trained model, each with the test at its new size.
TUNED = {
    "its own size, 112 px": ("own, 5", "resize 112 x 112"),
    "160 px, tested at 176 px": ("larger, 5", "resize 176 x 176"),
    "112 x 160 px": ("shape, 5", "shape 112 x 160"),
    "a tenth of the images": ("tenth, 5", "resize 112 x 112"),
}
CHANGES = {"kv-4": "as the rest", "kv-4-rate-10": "ten times that"}
LARGEST = "resize 224 x 224"


class Answer(NamedTuple):
    """The answer to a question: a table in Markdown, and a function that draws the figure of a name."""

    table: str
    draw: Callable[[Path], None]


def answers(lines: Sequence[Line], photographs: Sequence[Line]) -> dict[str, Answer]:
    """Return the answers by the names of their figures."""
    found = accuracies([line for line in photographs if line["setting"] == "imagenette"])
    settings = own_sizes(lines, found)
    return {
        "own_size": Answer(own_size_table(settings), lambda target: draw_own_size(settings, target)),
        "other_sizes": Answer(other_sizes_table(found), lambda target: draw_other_sizes(found, target)),
        "retrofit": Answer(retrofit_table(found), lambda target: draw_retrofit(found, target)),
    }


def own_sizes(lines: Sequence[Line], photographs: Accuracies) -> dict[str, dict[str, Values]]:
    """Collect accuracies at the trained size, by setting and model."""
    settings = {}
    for title, recipe in RECIPES.items():
        runs = grouped(lines, recipe)
        if BASE not in runs:
            continue
        # The names of models with patches of 2 px do not mention the start of their tables.
        names = {label: next((n for n in (a, b) if n in runs), None) for label, (a, b) in MODELS.items()}
        settings[title] = {
            label: {key: at(TRAINED, "resize")(line) for key, line in runs[name].items()}
            for label, name in names.items()
            if name is not None
        }
    settings[PHOTOGRAPHS] = {
        label: of_photographs(photographs[SCRATCH][name]["resize 112 x 112"])
        for label, (_, name) in MODELS.items()
        if name in photographs[SCRATCH]
    }
    return settings


def of_photographs(seeds: Mapping[int, float]) -> Values:
    return {(seed, ""): value for seed, value in seeds.items()}


def ahead(one: Values, other: Values) -> Estimate | None:
    """Return by how many points a model is better than another one, from runs of the same seed and precision."""
    both = {key: value - other[key] for key, value in one.items() if key in other}
    return Estimate.of(both) if both else None


def own_size_table(settings: Mapping[str, Mapping[str, Values]]) -> str:
    """Tabulate the accuracy of the learned embedding alone, and the differences of the other models to it."""
    rows = []
    for label in MODELS:
        cells = []
        for models in settings.values():
            found = ahead(models[label], models[ALONE]) if label in models else None
            cells.append(found.text("+") if found else "")
        if any(cells):
            rows.append([label, *cells])
    rows.sort(key=lambda row: row[0] != ALONE)
    rows[0][1:] = [Estimate.of(models[ALONE]).text() + " %" for models in settings.values()]
    return table(["", *settings], rows)


def other_sizes_table(photographs: Accuracies) -> str:
    """Tabulate accuracies at other sizes, of another shape and of a larger field, with the share that is kept there."""
    rows = []
    for label, (_, name) in MODELS.items():
        if name not in photographs[SCRATCH]:
            continue
        curve, field = photographs[SCRATCH][name], photographs[FIELD].get(name, {})
        tests = ("resize 80 x 80", "resize 112 x 112", "resize 176 x 176", LARGEST, "shape 112 x 160")
        near, far = (field.get(f"field {side} x {side}", {}) for side in (FIELDS[0], FIELDS[-1]))
        share = text(pairs(far, near, lambda a, b: 100 * a / b))
        rows.append([label, *(text(curve[test]) for test in tests), text(far), share])
    sizes = ["80 px", "112 px, trained", "176 px", "224 px", "112 x 160 px"]
    return table(["", *sizes, "field of 160 px", "kept there, %"], rows)


def retrofit_table(photographs: Accuracies) -> str:
    """Tabulate what `relvit.retrofit` changes in a fine-tuning, by what it trains on and how fast the tables learn."""
    rows = []
    for title, (part, test) in TUNED.items():
        plain = photographs[part]["plain"]
        for model, rate in CHANGES.items():
            curve = photographs[part].get(model)
            if curve is None:
                continue
            changes = [text(differences(curve[at], plain[at]), "+") for at in dict.fromkeys((test, LARGEST))]
            rows.append([title, rate, str(len(curve[test])), text(plain[test]), *changes])
    header = ["fine-tuned on", "tables learn", "seeds", "without tables, %", "with tables", "with tables, at 224 px"]
    return table(header, rows)


def differences(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return pairs(one, other, lambda a, b: a - b)


def draw_own_size(settings: Mapping[str, Mapping[str, Values]], target: Path) -> None:
    """Draw the differences to the learned embedding alone, with two standard errors."""
    labels = [label for label in MODELS if label != ALONE and any(label in models for models in settings.values())]
    figure = Figure(figsize=(9, 1.2 + 0.6 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for number, (title, models) in enumerate(settings.items()):
        for row, label in enumerate(labels):
            if found := ahead(models[label], models[ALONE]) if label in models else None:
                place = row + 0.18 * (number - (len(settings) - 1) / 2)
                axes.errorbar(found.mean, place, xerr=bar(found), fmt="o", color=f"C{number}", capsize=3)
        axes.plot([], [], "o", color=f"C{number}", label=title)
    axes.set_yticks(range(len(labels)), [label.replace("`", "") for label in labels])
    axes.invert_yaxis()
    finished(axes, "points of accuracy above a learned embedding alone; bars: two standard errors")
    figure.legend(loc="outside upper center", ncols=2)
    saved(figure, target)


def draw_other_sizes(photographs: Accuracies, target: Path) -> None:
    """Draw accuracy over size for photographs as a whole, and for a field that grows."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, part, protocol, sides in zip(panels, (SCRATCH, FIELD), ("resize", "field"), (SIDES, FIELDS), strict=True):
        for number, (label, (_, name)) in enumerate(MODELS.items()):
            if name in photographs[part]:
                tests = [Estimate.of(of_photographs(photographs[part][name][f"{protocol} {s} x {s}"])) for s in sides]
                errors = [bar(each) / 2 for each in tests]
                # Figures show the names without Markdown's backticks.
                look = {"color": f"C{number}", "marker": "o", "capsize": 3, "label": label.replace("`", "")}
                axes.errorbar(sides, [each.mean for each in tests], errors, **look)
        axes.axvline(112, color="grey", linestyle=":")
        axes.set_xticks(sides)
        whole = protocol == "resize"
        axes.set_title("the whole photograph at each size" if whole else "more of the photograph at one scale")
        finished(axes, "size in pixels; dotted: trained")
    panels[0].set_ylabel("top-1 accuracy, %; bars: one standard error")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    saved(figure, target)


def draw_retrofit(photographs: Accuracies, target: Path) -> None:
    """Draw what tables change in a fine-tuning, with two standard errors."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, (model, rate) in enumerate(CHANGES.items()):
        for row, (part, test) in enumerate(TUNED.values()):
            if model in photographs[part]:
                values = differences(photographs[part][model][test], photographs[part]["plain"][test])
                found = Estimate.of(of_photographs(values))
                place = row + 0.2 * (number - 0.5)
                axes.errorbar(found.mean, place, xerr=bar(found), fmt="o", color=f"C{number}", capsize=3)
        axes.plot([], [], "o", color=f"C{number}", label=f"tables learn {rate}")
    axes.set_yticks(range(len(TUNED)), TUNED)
    axes.invert_yaxis()
    finished(axes, "points of accuracy above the same fine-tuning without tables; bars: two standard errors")
    figure.legend(loc="outside upper center", ncols=2)
    saved(figure, target)


def bar(found: Estimate) -> float:
    """Return two standard errors, and 0 for a single seed."""
    return 0.0 if math.isnan(found.error) else 2 * found.error


def finished(axes: Axes, label: str) -> None:
    """Label and grid the axes; a difference of zero has a line."""
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    if label.startswith("points"):
        axes.axvline(0, color="grey")


def saved(figure: Figure, target: Path) -> None:
    with rc_context({"font.size": 12}):
        figure.savefig(target, dpi=80, metadata={"Software": None})
