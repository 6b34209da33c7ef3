"""`relvit resolutions`: a table of accuracy by image size."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Literal

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

from relvit.cli.parser import Parser
from relvit.evaluation import Size, evaluate_sizes


def main(command: str, arguments: Sequence[str]) -> None:
    """Run with command line arguments."""
    auto_cli(resolutions, args=list(arguments), prog=f"relvit {command}", as_positional=False, parser_class=Parser)


def resolutions(
    ckpt_path: str,
    sizes: list[Size],
    split: Literal["val", "test"] = "val",
    root: str | None = None,
    batch_size: int | None = None,
    accelerator: str = "auto",
    output: str | None = None,
) -> None:
    """Print the accuracy of a checkpoint at several image sizes; see `evaluate_sizes`.

    Args:
        ckpt_path: The checkpoint, runs/RUN/checkpoints/best.ckpt.
        sizes: Image sizes in pixels, such as [24,32,48] or [[32,48],64].
        split: Which images: val or test.
        root: The data's folder, where it is no longer what the checkpoint remembers.
        batch_size: Images per batch; none: as in training.
        accelerator: Lightning's name of the device, such as cpu or gpu.
        output: A CSV file to write the table to.
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
