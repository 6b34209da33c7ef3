"""Style of all figures: font sizes, escaped names, paths without their common parts, axis labels, legends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from relvit.app.utils.files import atomic_write

# These font sizes are legible even if a figure is shown at half its size.
FONT, SMALL = 15, 13
# The name of a class, or a line of a caption, has at most this number of characters.
LONGEST = 24


def literal(text: str) -> str:
    """Escape what Matplotlib would take for a formula."""
    return text.replace("$", r"\$")


def shortened(text: str) -> str:
    """Cut a name to 24 characters, and escape it."""
    return literal(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")


def save_figure(figure: Figure, target: str | Path, dpi: int = 100) -> None:
    """Write a figure into a PNG, which is complete or not written at all."""
    with atomic_write(target) as part:
        figure.savefig(part, dpi=dpi, format="png")


def label_axes(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Label a panel of curves and draw its grid."""
    axes.set_xlabel(xlabel, fontsize=FONT)
    axes.set_ylabel(ylabel, fontsize=FONT)
    axes.tick_params(labelsize=SMALL)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def save_with_legend(figure: Figure, title: str, target: str | Path) -> None:
    """Write panels of the same curves into a PNG, with one legend below."""
    handles, names = figure.axes[-1].get_legend_handles_labels()
    # The legend has two columns. Break longer names, whose letters are about 0.1 inches wide, because Matplotlib would
    # cut off a legend that is wider than the figure.
    letters = int((figure.get_figwidth() / 2 - 0.8) / 0.115)
    names = [textwrap.fill(name, letters) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=SMALL)
    figure.suptitle(title, fontsize=FONT)
    save_figure(figure, target)


def short_labels(paths: Sequence[str]) -> list[str]:
    """Shorten each path to the parts that differ: `runs/a/best.ckpt` and `runs/b/best.ckpt` become `a` and `b`."""
    parts = [Path(path).parts for path in paths]
    parts = [each[_common(parts) :] for each in parts]
    back = _common([each[::-1] for each in parts])
    shortened = ["/".join(each[: len(each) - back]) for each in parts]
    return shortened if all(shortened) else [str(path) for path in paths]


def _common(parts: Sequence[Sequence[str]]) -> int:
    """Count the leading parts in which all agree."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))))
