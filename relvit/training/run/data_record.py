"""Records of a run's images: their classes, `val_split.csv` (held out to validate), `unreadable.csv` (skipped)."""

from __future__ import annotations

from pathlib import Path

import torch.distributed
from lightning import Callback, LightningModule, Trainer

from relvit.data import ImageData, ImageFilesData
from relvit.data.labels import label_text
from relvit.utils.files import write_csv
from relvit.utils.messages import printable
from relvit.utils.progress import rank_zero_print

# Unreadable images that are printed where there is no folder to write to.
SHOWN = 5


class DataRecord(Callback):
    """Prints the number of training images of each class; writes `val_split.csv` (path, label) where images of train
    were held out to validate, and `unreadable.csv` (split, path, reason) where images were skipped, and prints how
    many.

    Args:
        folder: The folder to write to; None: the first unreadable images are only printed.

    Attributes:
        unreadable: The unreadable images reported so far, with the reason, by split; on the main process.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.unreadable: dict[str, dict[str, str]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """The number of unreadable images of each split that had some."""
        return {split: len(files) for split, files in self.unreadable.items()}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule
        if isinstance(data, ImageFilesData) and trainer.is_global_zero:
            rank_zero_print(data.training_images())
        held_out = data.held_out() if isinstance(data, ImageData) else []
        if held_out and self.folder and trainer.is_global_zero:
            rows = [[printable(name), label_text(label, data.class_names)] for name, label in held_out]
            write_csv(self.folder / "val_split.csv", ["path", "label"], rows)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Report the unreadable images at the end of a fit, validation, test or prediction."""
        data = trainer.datamodule
        if not isinstance(data, ImageData):
            return
        of_processes = [data.unreadable]
        if trainer.world_size > 1:
            of_processes = [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(of_processes, data.unreadable)
        found: dict[str, dict[str, str]] = {}
        for unreadable in of_processes:
            for split, files in unreadable.items():
                if files:
                    found.setdefault(split, {}).update(files)
        if not found or found == self.unreadable or not trainer.is_global_zero:
            return
        self.unreadable = found
        rows = [
            [split, printable(path), reason] for split, files in found.items() for path, reason in sorted(files.items())
        ]
        lines = [_sentence(split, len(files), data.trains_on(split)) for split, files in found.items()]
        if self.folder:
            write_csv(self.folder / "unreadable.csv", ["split", "path", "reason"], rows)
            lines[-1] += f" {self.folder / 'unreadable.csv'} says why."
        else:
            lines += [f"  {path}: {reason}" for _, path, reason in rows[:SHOWN]]
            lines += [f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        print("\n".join(lines), flush=True)


def _sentence(split: str, count: int, replaced: bool) -> str:
    images = "1 image" if count == 1 else f"{count} images"
    of = "" if split == "predict" else f" of {split}"
    if replaced:
        return f"{images}{of} could not be read; other images of {split} took their place in the batches."
    return f"{images}{of} could not be read and {'was' if count == 1 else 'were'} left out."
