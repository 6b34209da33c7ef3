"""What a run keeps about its images: which were put aside to validate, and which could not be read."""

from __future__ import annotations

import csv
from pathlib import Path

import torch.distributed
from lightning import Callback, LightningModule, Trainer

from relvit.data import ImageData
from relvit.utils.messages import printable

SHOWN = 5


class DataRecord(Callback):
    """Writes `val_split.csv` (path, label) where images of train were put aside to validate, and `unreadable.csv`
    (split, path, reason) where images were skipped, and prints how many.

    Args:
        folder: where to write; None: the first unreadable images are only printed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.told: dict[str, dict[str, str]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Unreadable images of each split that had some, as told so far."""
        return {split: len(files) for split, files in self.told.items()}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule
        held_out = data.held_out() if isinstance(data, ImageData) else []
        if held_out and self.folder and trainer.is_global_zero:
            rows = [[printable(name), data.class_names[label]] for name, label in held_out]
            _write(self.folder / "val_split.csv", ["path", "label"], rows)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._tell(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    def _tell(self, trainer: Trainer) -> None:
        data = trainer.datamodule
        if not isinstance(data, ImageData):
            return
        parts = [data.unreadable]
        if trainer.world_size > 1:
            parts = [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(parts, data.unreadable)
        found: dict[str, dict[str, str]] = {}
        for part in parts:
            for split, files in part.items():
                if files:
                    found.setdefault(split, {}).update(files)
        if found == self.told or not found or not trainer.is_global_zero:
            return
        self.told = found
        files_of = {split: sorted(files.items()) for split, files in found.items()}
        rows = [[split, printable(path), reason] for split, files in files_of.items() for path, reason in files]
        lines = [_sentence(split, len(files), data.trains_on(split)) for split, files in found.items()]
        if self.folder:
            _write(self.folder / "unreadable.csv", ["split", "path", "reason"], rows)
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


def _write(path: Path, header: list[str], rows: list[list[str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
