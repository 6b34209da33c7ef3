"""`relvit check-data`: broken files, classes, sizes and duplicates of a data set, by decoding every image."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from relvit.app.cli.errors import UsageError
from relvit.app.cli.outputs import print_table
from relvit.app.data import ImageData, ImageFolderData
from relvit.app.data.inspect import check_data as inspect_data
from relvit.app.utils.files import check_output, write_json
from relvit.app.utils.number_types import PositiveInt
from relvit.app.utils.progress import with_bar
from relvit.app.utils.shown_text import visible

SHOWN = 10
DUPLICATES = {"classes": "under different classes", "across": "in several splits", "within": "twice in a class"}


def check_data(
    root: str | None = None,
    *,
    data: ImageData | None = None,
    processes: PositiveInt | None = None,
    output: str | None = None,
) -> None:
    """Decode all images: broken files, classes, sizes, duplicates.

    The exit status is 1 if a file cannot be read, otherwise 0: duplicates do not stop a training.

    Args:
        root: The folder that holds train/CLASS/IMAGE, val/CLASS/IMAGE and test/CLASS/IMAGE.
        data: Another kind of data, with its options: --data NAME --data.OPTION VALUE.
        processes: The number of processes that decode; by default one for each core.
        output: A JSON file to which all results are written.
    """
    if (root is None) == (data is None):
        raise UsageError("give either --root DIR, which holds train/<class>/<image>, or --data NAME with its options")
    if root is not None and "://" not in root and not Path(root).is_dir():
        # Refuse the folder here: the data module's own message would name `--data.root`, which the user did not give.
        raise UsageError(f"{root} is not a folder; give the one that holds train/<class>/<image>")
    if output is not None:
        check_output(output, (".json",))
    report = inspect_data(
        ImageFolderData(root) if data is None else data, processes, partial(with_bar, what="decoding")
    )
    _show(report)
    if output is not None:
        write_json(output, report)
    if report["bad"]:
        raise SystemExit(1)


def _show(report: dict[str, Any]) -> None:
    rows = []
    for split, found in report["splits"].items():
        counts = sorted(found["classes"].values())
        sizes = [_range(found[side]) for side in ("height", "width")]
        present = sum(count > 0 for count in counts)
        each = str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        rows.append([split, str(found["images"]), str(present), each, *sizes])
    print_table(("split", "images", "classes", "images per class", "height", "width"), rows, wrap=True)
    bad = [f"{file['split']}: {visible(file['path'])}: {file['reason']}" for file in report["bad"]]
    print(f"files that cannot be read: {len(bad)}")
    for line in bad:
        print(f"  {line}")
    for name, where in DUPLICATES.items():
        groups = report[f"duplicates_{name}"]
        print(f"the same image {where}: {len(groups)}")
        for group in groups[:SHOWN]:
            images = (f"{visible(image['path'])} ({image['split']}, {image['class']})" for image in group)
            print("  " + ", ".join(images))
        if len(groups) > SHOWN:
            print(f"  and {len(groups) - SHOWN} more (--output FILE lists all)")


def _range(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['min']} to {spread['max']}, median {spread['median']:g}"
