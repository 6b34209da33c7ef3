"""Tables and a figure of what `tools/benchmark.py` wrote: `python tools/benchmark_report.py [results.jsonl]`.

Writes `results.md` and `results.png` beside the file (of the same name, whatever it is).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

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


def draw(rows: Sequence[Row]) -> Figure:
    """Bars from 1 to the time ratios: a panel per run and mode, two in a row, in it one per competitor and size."""
    panels = grouped(rows, (*RUN, "mode"))
    pairs = [list(panels.values())[first : first + 2] for first in range(0, len(panels), 2)]
    heights = [1.2 + 0.2 * max(len(panel) for panel in pair) for pair in pairs]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.add_gridspec(len(pairs), 2, height_ratios=heights)
    for line, pair in enumerate(pairs):
        for column, panel in enumerate(pair):
            _draw_panel(figure.add_subplot(cells[line, column]), panel)
    return figure


def _draw_panel(axes: Axes, panel: Sequence[Row]) -> None:
    first, sizes = panel[0], grouped(panel, ("size",))
    names = [name for (name,) in grouped(panel, ("name",)) if name != "plain"]
    thickness = 0.8 / len(sizes)
    for index, ((size,), group) in enumerate(sizes.items()):
        places = [place + (index - (len(sizes) - 1) / 2) * thickness for place in range(len(names))]
        by_name = {row["name"]: row for row in group}
        ratios = [time_ratio(by_name[name], plain_of(group)) if name in by_name else None for name in names]
        bars = axes.barh(places, [(ratio or 1) - 1 for ratio in ratios], 0.92 * thickness, left=1, color=f"C{index}")
        bars.set_label(f"{size} px")
        for place, name, ratio in zip(places, names, ratios, strict=True):
            if ratio is not None:
                aside = {
                    "xytext": (3 if ratio >= 1 else -3, 0),
                    "ha": "left" if ratio >= 1 else "right",
                    "va": "center",
                }
                axes.annotate(f"{ratio:.2f}", (ratio, place), textcoords="offset points", fontsize=8, **aside)
            elif name in by_name:
                axes.text(1.02, place, by_name[name]["status"].replace("ok", "no plain"), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="#333", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    # A few hundredths are not to look like much.
    found = [bar.get_x() + bar.get_width() for bar in axes.patches]
    axes.set_xlim(0.7 * min(0.6, *found), 1.4 * max(1.6, *found))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time / plain's", fontsize=8)
    axes.legend(fontsize=8)
    compiled = ", compiled" if first["compiled"] else ""
    what = f"{first['level']}s, {first['mode']}, {first['device']}, {first['dtype']}{compiled}"
    axes.set_title(f"{what}, batch {first['batch']} (run {first['run']})", fontsize=10)


def main(arguments: Sequence[str]) -> None:
    """Write the tables and the figure of the file named by the first argument."""
    source = Path(arguments[0]) if arguments else SOURCE
    rows = read(source)
    source.with_suffix(".md").write_text(render(rows))
    # By the digest a test sees whether the figure is that of the file.
    draw(rows).savefig(source.with_suffix(".png"), dpi=50, metadata={"Description": digest(source)})


def digest(source: Path) -> str:
    """SHA-256 of the file of samples."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
