"""`relvit check-data`: decode every image and say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from relvit.cli.errors import UsageError
from relvit.cli.parser import run_function
from relvit.data import ImageData, ImageFolderData
from relvit.data.check import check_data
from relvit.names import printable
from relvit.progress import with_bar

SHOWN = 10


def main(command: str, arguments: Sequence[str]) -> None:
    """Run with command line arguments; exit status 1 if there are bad files."""
    report = run_function(check, command, arguments)
    if report["bad"]:
        raise SystemExit(1)


def check(
    root: str | None = None,
    data: ImageData | None = None,
    processes: int | None = None,
    output: str | None = None,
) -> dict[str, Any]:
    """Decode every image; print bad files, classes, sizes and duplicates. The exit status is 1 if there are bad files.

    Args:
        root: A folder with train/CLASS/IMAGE, and val and test likewise.
        data: Or other images, as in fit: --data NAME --data.OPTION VALUE.
        processes: Processes that decode; none: one for each core.
        output: A JSON file to write everything to.
    """
    if (root is None) == (data is None):
        raise UsageError("give either --root DIR, which holds train/<class>/<image>, or --data NAME with its options")
    report = check_data(ImageFolderData(root) if data is None else data, processes, partial(with_bar, what="decoding"))
    _show(report)
    if output is not None:
        with open(output, "w") as file:
            json.dump(report, file, indent=2)
    return report


def _show(report: dict[str, Any]) -> None:
    table = Table("split", "images", "classes", "images per class", "height", "width")
    for split, found in report["splits"].items():
        counts = sorted(found["classes"].values())
        sizes = [_range(found[side]) for side in ("height", "width")]
        present = sum(count > 0 for count in counts)
        table.add_row(split, str(found["images"]), str(present), f"{counts[0]} to {counts[-1]}", *sizes)
    # No markup: paths may hold brackets.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    bad = [f"{file['split']}: {printable(file['path'])}: {file['reason']}" for file in report["bad"]]
    console.print(f"bad files: {len(bad)}")
    for line in bad:
        console.print(f"  {line}")
    for name, what in {"across": "splits that share", "within": "inside one split,"}.items():
        groups = report[f"duplicates_{name}"]
        console.print(f"{what} the same image: {len(groups)}")
        for group in groups[:SHOWN]:
            console.print("  " + ", ".join(f"{printable(image['path'])} ({image['split']})" for image in group))
        if len(groups) > SHOWN:
            console.print(f"  and {len(groups) - SHOWN} more (--output FILE lists all)")


def _range(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['min']} to {spread['max']}, median {spread['median']:g}"
