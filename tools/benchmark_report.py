"""Tables and a figure of what `tools/benchmark.py` wrote: `python tools/benchmark_report.py [results.jsonl]`.

Writes `results.md` and `results.png` beside the file (of the same name, whatever it is).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

Row = dict[str, Any]
SOURCE = Path(__file__).parent.parent / "docs" / "benchmarks" / "results.jsonl"
RUN = ("run", "level", "device", "dtype", "compiled", "batch")
GROUP = (*RUN, "size", "mode")
MIB = 1024**2
INTRODUCTION = """# Benchmarks

Written by `python tools/benchmark_report.py` from what `python tools/benchmark.py` appended to the file of raw samples
beside this one; not to be edited by hand.

- **Time.** In every round all competitors of a table are called once, in a freshly shuffled order, after three warm-up
  calls each. *forward* is the forward pass without gradients in evaluation mode; *train* is forward and backward of the
  sum of the outputs in training mode, from gradients that are None.
- **Time ratio.** The median over the rounds of (time of this one / time of `plain` in the same round); the ratio of the
  two medians would let slow spells of the machine in.
- **Noise.** `control` is a second instance of `plain`: what its ratio is away from 1, others' ratios may be as well.
- **Memory.** On the CPU, *forward*: the most that is allocated at a time, where that was measured; *train*: what the
  forward pass allocates and autograd still holds after it, for backward; input, output and parameters do not count. On
  a GPU: by how much a step's peak exceeds what was allocated before it, gradients included.
- **No figure.** *out of memory*, or *over the cap*: the first call took longer than the run allowed.
- **Models**, with 1000 classes, average pooling, without class token and layer scale: `plain` and `control` are timm's
  `vit_small_patch16_224`, `relpos` its `vit_relpos_small_patch16_224`, `rope` its `vit_small_patch16_rope_224`,
  `rope_mixed` its `vit_small_patch16_rope_mixed_224`; `relvit_small` is ours, and so are the attention-free `aft_conv`
  (15 x 15 windows, 384 heads), `aft_conv_h16` (11 x 11, 16 heads) and `aft_full`.
- **Layers**, of width 384 with 6 heads on (size / 16)² tokens: `plain` and `control` are timm's `Attention`, `sam` its
  `vision_transformer_sam.Attention` with relative positions (on keys alone), `relvit_X` is our `RelativeAttention` (on
  keys and values) with the backend X.
- **Afts**, attention-free layers of width 384 beside timm's `Attention` (`plain`, `control`): `aft_conv` is our
  `AFTConv2d` with 384 windows of 15 x 15, `aft_conv_X` the same with the backend X, `aft_conv_depthwise` with the
  paper's own way, a depthwise convolution of channels-first images by PyTorch; those in `_k31` have windows of
  31 x 31, and `aft_conv_h16` has 16 of 11 x 11.
"""


def read(path: str | Path) -> list[Row]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that agree in `keys`, groups and rows in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def plain_of(group: Iterable[Row]) -> Row | None:
    """The row that ratios refer to, if it was measured."""
    return next((row for row in group if row["name"] == "plain" and row["status"] == "ok"), None)


def time_ratio(row: Row, plain: Row | None) -> float | None:
    """Median over the rounds of the ratio within a round; None if one of the two has no figure.

    Raises:
        ValueError: the two were not measured in the same rounds.
    """
    if plain is None or not (row["seconds"] and plain["seconds"]):
        return None
    if len(row["seconds"]) != len(plain["seconds"]):
        counts = f"{len(row['seconds'])} samples of {row['name']!r}, {len(plain['seconds'])} of 'plain'"
        raise ValueError(f"{counts} in run {row['run']}: they cannot be paired by round")
    return statistics.median(ours / theirs for ours, theirs in zip(row["seconds"], plain["seconds"], strict=True))


def memory_ratio(row: Row, plain: Row | None) -> float | None:
    """Memory as a multiple of plain's; None if one of the two has no figure or plain needs nothing."""
    if plain is None or not plain["memory_bytes"] or row["memory_bytes"] is None:
        return None
    return row["memory_bytes"] / plain["memory_bytes"]


def render(rows: Sequence[Row]) -> str:
    """All rows as Markdown: a section per run, in it a table per size and mode; the same rows give the same text."""
    parts = [INTRODUCTION]
    for run in grouped(rows, RUN).values():
        parts.append(_heading(run[0]))
        parts.extend(_table(group) for group in grouped(run, GROUP).values())
    return "\n".join(parts)


def _heading(row: Row) -> str:
    """What all tables of a run have in common."""
    machine, versions = row["machine"], row["versions"]
    compiled = ", compiled" if row["compiled"] else ""
    place = f"{machine['gpu']}, " if machine["gpu"] else ""
    place += f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    return (
        f"## {row['level'].capitalize()}s on {row['device']}, {row['dtype']}{compiled}, batch {row['batch']}\n\n"
        f"Run {row['run']}, {row['rounds']} rounds, commit {row['commit']}; {place}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}.\n"
    )


def _table(group: Sequence[Row]) -> str:
    """The table of one size and mode, and the noise."""
    plain = plain_of(group)
    first = group[0]
    columns = {
        "": lambda row: f"`{row['name']}`",
        "median ms": _milliseconds,
        "images/s": _images,
        "time ratio": lambda row: _number(time_ratio(row, plain), 2),
        "memory MiB": lambda row: _number(None if row["memory_bytes"] is None else row["memory_bytes"] / MIB, 1),
        "memory ratio": lambda row: _number(memory_ratio(row, plain), 2),
    }
    if first["level"] != "model":
        del columns["images/s"]
    # Without gradients the CPU keeps nothing: a column of zeros says less than none.
    if not any(row["memory_bytes"] for row in group):
        del columns["memory MiB"], columns["memory ratio"]
    lines = [" | ".join(columns), " | ".join(["---", *["---:"] * (len(columns) - 1)])]
    lines += [" | ".join(cell(row) for cell in columns.values()) for row in group]
    noise = next((time_ratio(row, plain) for row in group if row["name"] == "control"), None)
    noise_line = f"\nNoise: `control` took {noise:.3f} times as long as `plain`.\n" if noise is not None else ""
    table = "\n".join(f"| {line} |" for line in lines)
    return f"### {first['size']} px, {first['mode']}\n\n{table}\n{noise_line}"


def _milliseconds(row: Row) -> str:
    """The median time, or why there is none."""
    return f"{1000 * statistics.median(row['seconds']):.2f}" if row["seconds"] else row["status"]


def _images(row: Row) -> str:
    """Images per second at the median time."""
    return _number(row["batch"] / statistics.median(row["seconds"]) if row["seconds"] else None, 1)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


class Panel(NamedTuple):
    """One message of the figure: what a training step takes, as a multiple of what plain takes.

    Attributes:
        level: the level of its rows.
        title: the message, with `{ours}`, the multiple of the first competitor at the largest size that the first two
            have, `{times}`, how often it goes into the second one's, and `{patches}`, the number of patches there.
        names: its competitors, ours first: names of rows, and names for readers.
        plain: what plain is.
        memory: compare what backward needs, not time.
        size: the only size, drawn as bars; None: all of them, as lines.
    """

    level: str
    title: str
    names: dict[str, str]
    plain: str
    memory: bool = False
    size: int | None = None

    @property
    def unit(self) -> str:
        """The name of the axis of the multiples."""
        return f"{'memory' if self.memory else 'time'}, multiple of {self.plain}'s"


MODELS = {
    "relvit_small": "relvit_small",
    "relpos": "relative bias (timm)",
    "rope_mixed": "mixed RoPE (timm)",
    "rope": "axial RoPE (timm)",
}
LAYERS = {"relvit_tiled": "relvit", "relvit_reference": "the paper's algorithm"}
AFTS = {"aft_conv": "AFT-conv", "aft_conv_h16": "AFT-conv, 16 heads", "aft_conv_depthwise": "as a convolution"}
PANELS = (
    Panel("model", "relvit_small trains in {ours:.2f} times\nthe time of a plain ViT-S", MODELS, "ViT-S", size=224),
    Panel(
        "model", "relvit_small keeps {ours:.2f} times\nthe memory for backward", MODELS, "ViT-S", memory=True, size=224
    ),
    Panel("model", "relvit_small on larger images:\n{ours:.2f} times at {patches:,} patches", MODELS, "ViT-S"),
    Panel(
        "layer",
        "A layer: {times:.0f} times faster than the\npaper's algorithm, {patches:,} patches",
        LAYERS,
        "attention",
    ),
    Panel(
        "layer",
        "A layer: 1/{times:.0f} of its memory\nfor backward, {patches:,} patches",
        LAYERS,
        "attention",
        memory=True,
    ),
    Panel("aft", "A layer of AFT-conv: {ours:.2f} of\nattention's time, {patches:,} patches", AFTS, "attention"),
)
# Okabe and Ito's, which colour-blind readers tell apart.
OURS, *OTHERS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
STYLE = {
    "font.size": 15,
    "axes.titlesize": 17,
    "axes.titlepad": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
TICKS = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
PATCH = 16


def draw(rows: Sequence[Row]) -> Figure:
    """Draw a panel per message that there are rows for: training steps, on the device of the first row."""
    first = rows[0]
    alike = {**{key: first[key] for key in ("device", "dtype", "compiled")}, "mode": "train"}
    rows = [row for row in rows if all(row[key] == value for key, value in alike.items())]
    found = [(panel, points) for panel in PANELS if (points := _points(rows, panel))]
    lines = math.ceil(len(found) / 2)
    with rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(14, 5.2 * lines + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.2)
        for place, (panel, points) in enumerate(found, start=1):
            axes = figure.add_subplot(lines, 2, place)
            (_lines if panel.size is None else _bars)(axes, panel, points)
            axes.set_title(_title(panel, points))
        batches = sorted({row["batch"] for row in rows})
        batch = f"batch {batches[0]}" if len(batches) == 1 else f"batches of {batches[0]} to {batches[-1]}"
        compiled = ", compiled" if first["compiled"] else ""
        note = f"Forward and backward on {first['device']}, {first['dtype']}{compiled}, {batch}. Dashed: plain."
        figure.supxlabel(note, fontsize=14)
    return figure


def _points(rows: Iterable[Row], panel: Panel) -> dict[str, dict[int, float]]:
    """Multiples by competitor and size, each of the last run that has it; {} where ours has none."""
    ratio_of = memory_ratio if panel.memory else time_ratio
    points: dict[str, dict[int, float]] = {name: {} for name in panel.names}
    for group in grouped((row for row in rows if row["level"] == panel.level), GROUP).values():
        plain, size = plain_of(group), group[0]["size"]
        for row in group:
            ratio = ratio_of(row, plain)
            if row["name"] in points and ratio is not None and panel.size in (None, size):
                points[row["name"]][size] = ratio
    if not points[next(iter(panel.names))]:
        return {}
    return {name: dict(sorted(line.items())) for name, line in points.items() if line}


def _title(panel: Panel, points: dict[str, dict[int, float]]) -> str:
    ours, other = [*points.values(), next(iter(points.values()))][:2]
    size = max(ours.keys() & other.keys(), default=max(ours))
    times = other.get(size, math.nan) / ours[size]
    return panel.title.format(ours=ours[size], times=times, patches=(size // PATCH) ** 2)


def _bars(axes: Axes, panel: Panel, points: dict[str, dict[int, float]]) -> None:
    ratios = [line[panel.size] for line in points.values()]
    axes.barh(range(len(ratios)), ratios, 0.6, color=[OURS, *["#9A9A9A"] * (len(ratios) - 1)])
    axes.axvline(1, color="black", linewidth=1.2, linestyle="--")
    for place, ratio in enumerate(ratios):
        axes.annotate(f"{ratio:.2f}", (ratio, place), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(ratios)), [panel.names[name] for name in points])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(1, *ratios))
    axes.set_xlabel(f"{panel.unit}, {panel.size} px")


def _lines(axes: Axes, panel: Panel, points: dict[str, dict[int, float]]) -> None:
    for colour, (name, line) in zip((OURS, *OTHERS), points.items(), strict=False):
        patches = [(size // PATCH) ** 2 for size in line]
        axes.plot(patches, line.values(), "o-", color=colour, linewidth=3, markersize=9, label=panel.names[name])
    axes.axhline(1, color="black", linewidth=1.2, linestyle="--")
    ratios = [1.0, *(ratio for line in points.values() for ratio in line.values())]
    axes.set_xscale("log")
    if max(ratios) / min(ratios) > 5:
        axes.set_yscale("log")
        axes.set_ylim(min(ratios) / 1.3, 1.3 * max(ratios))
        axes.set_yticks([tick for tick in TICKS if min(ratios) / 1.3 <= tick <= 1.3 * max(ratios)])
    sizes = sorted({(size // PATCH) ** 2 for line in points.values() for size in line})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=13)
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("patches in the image")
    axes.set_ylabel(panel.unit)
    # Beside the data: there is no corner that stays free.
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, frameon=False, fontsize=14)


def main(arguments: Sequence[str]) -> None:
    """Write the tables and the figure of the file named by the first argument."""
    source = Path(arguments[0]) if arguments else SOURCE
    rows = read(source)
    source.with_suffix(".md").write_text(render(rows))
    # By the digest a test sees whether the figure is that of the file.
    draw(rows).savefig(source.with_suffix(".png"), dpi=100, metadata={"Description": digest(source)})


def digest(source: Path) -> str:
    """SHA-256 of the file of samples."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
