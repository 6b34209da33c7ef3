"""`relvit resolutions`: tables and curves of accuracy, calibration, speed and memory by image size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from relvit.app.cli.outputs import output_files, print_table, write_rows
from relvit.app.data import Fill, SizeProtocol
from relvit.app.evaluation import PROTOCOLS, Size, evaluate_sizes
from relvit.app.evaluation.standard_error import plus_minus
from relvit.app.plots import plot_size_grid, plot_sizes
from relvit.app.plots.style import short_labels
from relvit.app.utils.files import kept_path
from relvit.app.utils.number_types import BatchSize
from relvit.app.utils.progress import with_bar
from relvit.app.utils.shown_text import counted, without_secrets
from relvit.models import Reach

# `COLUMNS` maps the title of each printed column to the key in the rows of `evaluate_sizes` and the format of numbers.
COLUMNS = {
    "acc1": ("acc1", "{:.4f}"),
    "±": ("acc1_se", "{:.4f}"),
    "acc5": ("acc5", "{:.4f}"),
    "mAP": ("map", "{:.4f}"),
    "F1": ("f1", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
    "calibration\nerror": ("calibration_error", "{:.4f}"),
    "images/s": ("images_per_second", "{:.0f}"),
    "GMACs": ("gmacs", "{:.3g}"),
    "memory\nMiB": ("mib", "{:,.1f}"),
}


def resolutions(
    ckpt_path: list[str] | str,
    *,
    sizes: list[Size],
    widths: list[int] | None = None,
    protocol: SizeProtocol = "crop",
    fill: Fill | None = None,
    split: Literal["train", "val", "test"] = "val",
    root: str | None = None,
    batch_size: BatchSize | None = None,
    accelerator: str = "auto",
    output: str | None = None,
    reach: Reach = "trained",
    data: str | None = None,
    data_args: Mapping[str, Any] | None = None,
) -> None:
    """Evaluate checkpoints at several image sizes: accuracy, calibration, speed, memory.

    Args:
        ckpt_path: The checkpoint, or several of the same classes and images.
        sizes: The image sizes in pixels, such as [24,32,48] or [[32,48],64].
        widths: The widths in pixels of a grid of image sizes, such as [24,32,48]. sizes are then the heights of the
            grid, and the figure is a heat map. Sizes that are not square are evaluated a second time, with the images
            squashed to a square of nearly the same number of patches.
        protocol: How images get their size. resize squashes the whole image to the size, so that objects grow; crop
            resizes by the crop ratio and crops, as timm does; field keeps the scale of objects as in training, so that
            the model sees more or less of the image.
        fill: What field shows beyond the image: reflect (the default) mirrors the image; grey is the normalisation's
            mean.
        split: The images to use: train, val or test.
        accelerator: The kind of device, by Lightning's name: auto, cpu, gpu or mps.
    """
    targets = output_files(output, "resolutions")
    if widths is not None:
        if pairs := [size for size in sizes if not isinstance(size, int)]:
            raise ValueError(f"with widths, each of sizes is a height: give one number, got {pairs[0]}")
        sizes = [(height, width) for height in sizes for width in widths]
    options = (split, root, batch_size, accelerator, protocol, fill, with_bar, reach)
    found = evaluate_sizes(ckpt_path, sizes, *options, squares=widths is not None, data=data, data_args=data_args)
    rows = without_secrets(found)
    meaning = f"{protocol}: {PROTOCOLS[protocol]}" + (f"; reach {reach}" if reach != "trained" else "")
    checkpoints = list(dict.fromkeys(map(_title, rows)))
    if len(checkpoints) > 1:
        checkpoints = [f"{number}  {text}" for number, text in enumerate(checkpoints, 1)]
    title = f"{counted(rows[0]['images'], 'image')} of {split}; {meaning}"
    print(*checkpoints, title, sep="\n", flush=True)
    _print(rows)
    numbers = list(dict.fromkeys(row["checkpoint"] for row in rows))
    for row in rows:
        if "acc1_difference" in row:
            number, text = numbers.index(row["checkpoint"]) + 1, plus_minus(row, "acc1_difference", "{:+.4f}")
            print(f"{number} minus 1, on the same images at {row['height']} x {row['width']}: {text}", flush=True)
        if "square_difference" in row:
            text, side = plus_minus(row, "square_difference", "{:+.4f}"), row["square"]
            which = f"{numbers.index(row['checkpoint']) + 1} at " if len(numbers) > 1 else ""
            print(f"{which}{row['height']} x {row['width']} minus squashed to {side} x {side}: {text}", flush=True)
    # The files name checkpoints by absolute paths, so that `relvit publish` finds their rows from any folder.
    of_files = [row | {"checkpoint": kept_path(row["checkpoint"])} for row in rows]
    for target in targets:
        labels = short_labels([row["checkpoint"] for row in rows])
        plot = plot_sizes if widths is None else plot_size_grid
        write_rows(target, of_files, partial(plot, rows, labels, title=title))


def _title(row: dict[str, Any]) -> str:
    sizes = ", ".join(f"{height} x {width}" for height, width in row["train_sizes"])
    trained = f"trained at {sizes} px" if sizes else "trained on images of their own shapes"
    return f"{row['checkpoint']}: {row['model']}, {trained}"


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table by size; of several checkpoints by size and number."""
    rows = [
        row | {"gmacs": row["macs"] / 1e9, "mib": row["peak_memory"] and row["peak_memory"] / 2**20} for row in rows
    ]
    columns = {title: column for title, column in COLUMNS.items() if column[0] in rows[0]}
    numbers = {path: str(number) for number, path in enumerate(dict.fromkeys(row["checkpoint"] for row in rows), 1)}
    lines: dict[str, list[list[str]]] = {}
    for row in rows:
        values = ["" if row[key] is None else text.format(row[key]) for key, text in columns.values()]
        of_size = lines.setdefault(f"{row['height']} x {row['width']}", [])
        of_size.append([numbers[row["checkpoint"]], *values] if len(numbers) > 1 else values)
    cells = ([size if line is of_size[0] else "", *line] for size, of_size in lines.items() for line in of_size)
    print_table(("size", *([""] if len(numbers) > 1 else []), *columns), cells)
