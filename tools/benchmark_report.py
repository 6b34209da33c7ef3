"""Write tables and a figure of measurements by `benchmark.py`: `python tools/benchmark_report.py [results.jsonl]`.

The tool writes `results.md` and `results.png` beside the file; without an argument also the table of the README.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "docs" / "benchmarks" / "results.jsonl"
BEGIN, END = "<!-- written by tools/benchmark_report.py -->", "<!-- end -->"
RUN = ("run", "level", "device", "dtype", "compiled", "batch")
GROUP = (*RUN, "size", "mode")
INTRODUCTION = """# Benchmarks

Written by `python tools/benchmark_report.py` from the [raw samples]({name}); not to be edited by hand.
[How to read the tables](README.md#how-to-read-the-tables).
"""


def read(path: str | Path) -> list[Row]:
    """Read the rows of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Group the rows that agree in `keys`, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def ratios(group: Iterable[Row], memory: bool = False) -> dict[str, float]:
    """Return the multiple of plain's time, or memory, of each row that has a figure, by name.

    The multiple of time is the median over the rounds of the ratio within a round.

    Raises:
        ValueError: a row and plain's were not measured in the same rounds.
    """
    group = list(group)
    plain = next((row for row in group if row["name"] == "plain" and row["status"] == "ok"), None)
    if plain is None:
        return {}
    if memory:
        found = {row["name"]: row["memory_bytes"] for row in group if row["memory_bytes"] is not None}
        return {name: value / plain["memory_bytes"] for name, value in found.items() if plain["memory_bytes"]}
    result = {}
    for row in (row for row in group if row["seconds"]):
        pairs = list(zip(row["seconds"], plain["seconds"], strict=False))
        if not len(pairs) == len(row["seconds"]) == len(plain["seconds"]):
            counts = f"{len(row['seconds'])} samples of {row['name']!r}, {len(plain['seconds'])} of 'plain'"
            raise ValueError(f"{counts} in run {row['run']}: they cannot be paired by round")
        result[row["name"]] = median(ours / theirs for ours, theirs in pairs)
    return result


def render(rows: Sequence[Row], name: str = SOURCE.name) -> str:
    """Return all rows, of a file of this name, as Markdown: a table per run, runs below their machine and versions."""
    parts, place = [INTRODUCTION.format(name=name)], ""
    for run in grouped(rows, RUN):
        first = run[0]
        if (where := _place(first)) != place:
            parts.append(f"## {where}\n")
            place = where
        # Eight digits are enough to identify a commit.
        commit = re.sub(r"([0-9a-f]{8})[0-9a-f]+", r"\1", first["commit"])
        compiled = ", compiled" if first["compiled"] else ""
        parts.append(
            f"### {first['level'].capitalize()}s, {first['dtype']}{compiled}, batch {first['batch']}\n\n"
            f"Run {first['run']}, {first['rounds']} rounds, commit {commit}.\n\n{_table(run)}"
        )
    return "\n".join(parts)


def _place(row: Row) -> str:
    """Describe the machine of a row and the versions of its libraries."""
    machine, versions = row["machine"], row["versions"]
    place = f"{machine['gpu']}, " if machine["gpu"] else ""
    place += f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    return f"{place}; {', '.join(f'{name} {version}' for name, version in versions.items())}"


def _table(run: Sequence[Row]) -> str:
    """Return the table of a run: a row per competitor, columns per size and mode."""
    columns: dict[str, dict[str, str]] = {}
    for group in grouped(run, GROUP):
        time, memory, first = ratios(group), ratios(group, memory=True), group[0]
        title = f"{first['size']} px, {first['mode']}"
        columns[f"{title}, ms"] = {
            row["name"]: _with_ratio(1000 * median(row["seconds"]), 2, time.get(row["name"]))
            if row["seconds"]
            else row["status"]
            for row in group
        }
        # On a CPU a forward pass allocates memory for its largest layer, which says little, and early runs recorded
        # zeros.
        if (first["device"], first["mode"]) != ("cpu", "forward") and any(row["memory_bytes"] for row in group):
            columns[f"{title}, MiB"] = {
                row["name"]: _with_ratio(row["memory_bytes"] / 2**20, 1, memory.get(row["name"]))
                for row in group
                if row["memory_bytes"] is not None
            }
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    for name in dict.fromkeys(row["name"] for row in run):
        lines.append([f"`{name}`", *(cells.get(name, "–") for cells in columns.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _with_ratio(value: float, digits: int, ratio: float | None) -> str:
    """Write a figure and, after a comma, its multiple of plain's where there is one."""
    return f"{value:.{digits}f}" + ("" if ratio is None else f", {ratio:.2f}")


COMPARED = {
    # On the CPU, `relvit_small` chooses the backend 'tiled' by itself.
    "`relvit_small`": ("relvit_small", "relvit_small_tiled"),
    "`relpos`: `vit_relpos_small_patch16_224`": ("relpos",),
    "`rope`: `vit_small_patch16_rope_224`": ("rope",),
    "`rope_mixed`: `vit_small_patch16_rope_mixed_224`": ("rope_mixed",),
}
SIZES = (112, 224, 384, 512)


def summary(rows: Iterable[Row]) -> str:
    """Return the README's table: models on the CPU, the lowest and highest ratio of all runs at each size.

    Runs from before `benchmark.keep_memory` are left out.
    """
    kind = {"level": "model", "device": "cpu", "dtype": "float32", "compiled": False, "keeps_memory": True}
    rows = [row for row in rows if all(row.get(key) == value for key, value in kind.items())]
    groups = [(group[0]["size"], group[0]["mode"], group) for group in grouped(rows, GROUP)]

    def span(names: Sequence[str], size: int, mode: str, memory: bool = False) -> str:
        measured = [ratios(group, memory) for *key, group in groups if key == [size, mode]]
        found = sorted({f"{one[name]:.2f}" for one in measured for name in names if name in one})
        return "–".join(dict.fromkeys((found[0], found[-1]))) if found else "not measured"

    lines = [f"| | {' | '.join(f'{size} px' for size in SIZES)} | memory, 224 px |", "|---" * (len(SIZES) + 2) + "|"]
    for title, names in {"plain ViT-S": ("plain",), **COMPARED}.items():
        times = [f"{span(names, size, 'forward')}, {span(names, size, 'train')}" for size in SIZES]
        lines.append(f"| {title} | {' | '.join(times)} | {span(names, 224, 'train', memory=True)} |")
    return "\n".join(lines)


# The names of rows, and the names of the same models in the figure; relvit's own models come first.
PANELS = {
    "model": {
        "relvit_small": "relvit_small",
        "relpos": "relative bias (timm)",
        "rope_mixed": "mixed RoPE (timm)",
        "rope": "axial RoPE (timm)",
    },
    "layer": {"relvit_tiled": "relvit's layer", "relvit_reference": "the paper's algorithm"},
    "aft": {"aft_conv": "AFT-conv's layer", "aft_conv_h16": "with 16 heads", "aft_conv_depthwise": "as a convolution"},
}
# Colour-blind readers can distinguish these colours of Okabe and Ito.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
TICKS = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
STYLE = {"font.size": 15, "axes.titlesize": 17, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}


def draw(rows: Sequence[Row]) -> Figure:
    """Draw time and memory of training steps at each level that there are rows for, on the device of the first row."""
    alike = {**{key: rows[0][key] for key in ("device", "dtype", "compiled")}, "mode": "train"}
    rows = [row for row in rows if all(row[key] == value for key, value in alike.items())]
    found = {(level, memory): _lines(rows, level, memory) for level in PANELS for memory in (False, True)}
    found = {key: lines for key, lines in found.items() if next(iter(PANELS[key[0]])) in lines}
    count = math.ceil(len(found) / 2)
    with rc_context(STYLE):
        figure = Figure(figsize=(14, 5.2 * count + 0.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.2)
        for number, ((level, memory), lines) in enumerate(found.items(), start=1):
            _draw_panel(figure.add_subplot(count, 2, number), level, memory, lines)
        compiled = ", compiled" if alike["compiled"] else ""
        note = f"Training steps (memory: for backward) on {alike['device']}, {alike['dtype']}{compiled}. Dashed: plain."
        figure.supxlabel(note, fontsize=14)
    return figure


def _lines(rows: Iterable[Row], level: str, memory: bool) -> dict[str, dict[int, float]]:
    """Return multiples of plain by competitor and number of patches, of the last run that has them."""
    lines: dict[str, dict[int, float]] = {name: {} for name in PANELS[level]}
    for group in grouped((row for row in rows if row["level"] == level), GROUP):
        for name, ratio in ratios(group, memory).items():
            if name in lines:
                lines[name][(group[0]["size"] // 16) ** 2] = ratio
    return {name: dict(sorted(line.items())) for name, line in lines.items() if line}


def _draw_panel(axes: Axes, level: str, memory: bool, lines: dict[str, dict[int, float]]) -> None:
    """Draw the multiples of plain's time or memory by the number of patches; the title has relvit's last multiple."""
    names, unit = PANELS[level], "memory" if memory else "time"
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        axes.plot(line.keys(), line.values(), "o-", color=colour, linewidth=3, markersize=9, label=names[name])
    axes.axhline(1, color="black", linewidth=1.2, linestyle="--")
    values = [1.0, *(ratio for line in lines.values() for ratio in line.values())]
    patches = sorted({count for line in lines.values() for count in line})
    axes.set_xscale("log")
    axes.set_xticks(patches, [f"{count:,}" for count in patches], fontsize=13)
    axes.set_xlabel("patches in the image")
    if max(values) / min(values) > 5:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.3, 1.3 * max(values))
        axes.set_yticks([tick for tick in TICKS if min(values) / 1.3 <= tick <= 1.3 * max(values)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(f"{unit}, multiple of plain's")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    # The legend is below the axes, where no data can be.
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, frameon=False, fontsize=14)
    most, ratio = list(next(iter(lines.values())).items())[-1]
    plain = "a plain ViT-S" if level == "model" else "plain attention"
    axes.set_title(f"{next(iter(names.values()))}: {ratio:.2f} times the {unit}\nof {plain}, {most:,} patches")


def replaced(text: str, table: str, begin: str = BEGIN) -> str:
    """Return the text with the table between its markers."""
    text, count = re.subn(f"(?s){begin}.*?{END}", lambda _: f"{begin}\n\n{table}\n\n{END}", text)
    assert count == 1, f"expected one table between the lines {begin!r} and {END!r}, found {count}"
    return text


def digest(source: Path) -> str:
    """Return the SHA-256 of the file of samples; a test compares it with the SHA-256 in the figure."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def main(arguments: Sequence[str]) -> None:
    """Write the tables and the figure of the file that the first argument names."""
    source = Path(arguments[0]) if arguments else SOURCE
    rows = read(source)
    source.with_suffix(".md").write_text(render(rows, source.name))
    draw(rows).savefig(source.with_suffix(".png"), dpi=100, metadata={"Description": digest(source)})
    if source == SOURCE:
        readme = ROOT / "README.md"
        readme.write_text(replaced(readme.read_text(), summary(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
