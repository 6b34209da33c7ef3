"""`relvit resolutions`: a table of accuracy by image size."""

from __future__ import annotations

import csv
from typing import Literal

from rich.console import Console
from rich.table import Table

from relvit.evaluation import Size, evaluate_sizes


def resolutions(
    ckpt_path: str,
    sizes: list[Size],
    split: Literal["train", "val", "test"] = "val",
    root: str | None = None,
    batch_size: int | None = None,
    accelerator: str = "auto",
    output: str | None = None,
) -> None:
    """Print the accuracy of a checkpoint at several image sizes; see `evaluate_sizes`.

    Args:
        ckpt_path: The checkpoint to use, such as runs/RUN/checkpoints/best.ckpt.
        sizes: The image sizes in pixels, such as [24,32,48] or [[32,48],64].
        split: The images to use: those of train, val or test.
        root: The folder of the images, where it is not the one that the checkpoint remembers.
        batch_size: The number of images in a batch; None means as in training.
        accelerator: The kind of device by Lightning's name: auto, cpu, gpu or mps.
        output: A CSV file to which the table is written, too.
    """
    rows = evaluate_sizes(ckpt_path, sizes, split, root, batch_size, accelerator)
    table = Table(title=f"{ckpt_path} on {split}")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if output is not None:
        with open(output, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
