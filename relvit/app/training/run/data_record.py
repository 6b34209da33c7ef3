"""Callback that records a run's images (with `images_csv.py`), and refuses images that differ between processes.

A resumed training compares its images with digests in the checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed
from lightning import Callback, LightningModule, Trainer

from relvit.app.data import ImageData, ImageFilesData
from relvit.app.data.class_labels import label_text
from relvit.app.data.modules.base import Split
from relvit.app.training.run.images_csv import (
    FILE,
    SPLITS,
    Digests,
    compute_digests,
    describe_difference,
    write_manifest,
)
from relvit.app.utils.files import write_csv
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.shown_text import counted, printable, visible, visible_lines

# If there is no folder for `unreadable.csv`, at most this number of unreadable images is printed.
SHOWN = 5
# `SPLITS_OF_STAGE` maps stages of Lightning to the splits that they use. The stage 'test' is not in it, because the
# data module's `evaluated_split` says which split a test uses.
SPLITS_OF_STAGE: dict[str, tuple[Split, ...]] = {"fit": SPLITS, "validate": ("val",), "predict": ("predict",)}


class DataRecord(Callback):
    """Record the images of a run in files and in checkpoints, and print the number of training images of each class.

    - `images.csv.gz` (split, name, content, label) lists all images of train and val, if the data module can list them.
    - `val_split.csv` (path, label) lists images of train that are held out for validation, if there are some.
    - `unreadable.csv` (split, path, reason) lists skipped images, if there are some; their number is printed.

    Checkpoints hold digests of the images of train and val. A training resumes only with the same images: the same
    names, labels and contents (size in bytes, or hash of the pixels, see `ListedImage`), in the same order. The images
    may be in another folder.

    Args:
        folder: The folder to write to. None: no file is written, and only the first unreadable images are printed.

    Attributes:
        digests: The digests of the images of train and val; empty outside a training and in other processes than the
            main one.
        unreadable: For each split, a dictionary from the path of each unreadable image that has been reported to the
            reason; empty in other processes than the main one.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.unreadable: dict[str, dict[str, str]] = {}
        self.digests: Digests = {}

    @property
    def counts(self) -> dict[str, int]:
        """The number of unreadable images of each split that had some."""
        return {split: len(files) for split, files in self.unreadable.items()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to run if processes have different numbers of images, as with an incomplete copy on a machine's disk.

        Each process takes a share of all images that it sees. If processes saw different numbers of images, some images
        would be used twice, or a process would wait for another process forever.

        Raises:
            ValueError: The number of images of a split differs.
        """
        data = trainer.datamodule
        if trainer.world_size == 1 or not isinstance(data, ImageData):
            return
        splits = SPLITS_OF_STAGE.get(stage, (data.evaluated_split,))
        of_processes: list[dict[Split, int]] = [{} for _ in range(trainer.world_size)]
        torch.distributed.all_gather_object(of_processes, {split: len(data.dataset(split)) for split in splits})
        for rank, counts in enumerate(of_processes):
            for split, count in counts.items():
                if count != (of_main := of_processes[0][split]):
                    raise ValueError(
                        f"process {rank} has {counted(count, 'image')} of {split}, and the main process has "
                        f"{of_main:,}: give all machines the same images"
                    )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule
        if isinstance(data, ImageFilesData) and trainer.is_global_zero:
            rank_zero_print(data.training_images())
        held_out = data.held_out() if isinstance(data, ImageData) else []
        if held_out and self.folder and trainer.is_global_zero:
            rows = [[printable(name), label_text(label, data.class_names)] for name, label in held_out]
            write_csv(self.folder / "val_split.csv", ["path", "label"], rows)

    def state_dict(self) -> dict[str, Any]:
        return {"images": self.digests} if self.digests else {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume a training with other images, in all processes; only the main process compares.

        Raises:
            ValueError: The images of train or val differ.
        """
        # Skip the check while `FindLearningRate` loads a checkpoint, which is a temporary one of the same training.
        resumes = trainer.state.fn == "fit" and pl_module.range_test is None
        if not resumes or not isinstance(trainer.datamodule, ImageData):
            return
        difference = ""
        if trainer.is_global_zero:
            state = checkpoint["callbacks"].get(self.state_key)
            difference = self._difference(trainer, state.get("images") if isinstance(state, dict) else None)
        if difference := trainer.strategy.broadcast(difference):
            raise ValueError(
                f"the checkpoint is from a training on other images ({difference}): go on with the same images, in "
                "whatever folder, or start another training from these weights with --model.pretrained"
            )

    def _difference(self, trainer: Trainer, before: Any) -> str:
        self.digests = compute_digests(trainer.datamodule)
        if isinstance(before, dict):
            run = Path(trainer.ckpt_path).parent.parent
            return describe_difference(before, self.digests, trainer.datamodule, run / FILE)
        if self.digests:
            warnings.warn(
                "the checkpoint does not say which images its training had, as one of relvit fit does: whether they "
                "are still the same is not checked",
                stacklevel=2,
            )
        return ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write `images.csv.gz`."""
        # Write the file only in this hook: with every strategy Lightning calls `on_load_checkpoint`, which compares the
        # images with the old file, at some time before this hook.
        data = trainer.datamodule
        if self.folder is None or not isinstance(data, ImageData) or not trainer.is_global_zero:
            return
        if not self.digests or not (self.folder / FILE).is_file():
            self.digests = write_manifest(data, self.folder / FILE)

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
        # The data module of a test after a training still holds the training's unreadable files: do not report them
        # again.
        new = {split: files for split, files in found.items() if files != self.unreadable.get(split)}
        if not new or not trainer.is_global_zero:
            return
        self.unreadable = found
        rows = [
            [split, printable(path), reason] for split, files in found.items() for path, reason in sorted(files.items())
        ]
        lines = [unreadable_sentence(split, len(files), data.trains_on(split)) for split, files in new.items()]
        if self.folder:
            write_csv(self.folder / "unreadable.csv", ["split", "path", "reason"], rows)
            lines[-1] += f" {self.folder / 'unreadable.csv'} says why."
        else:
            shown = [row for row in rows if row[0] in new]
            lines += [f"  {visible(path)}: {reason}" for _, path, reason in shown[:SHOWN]]
            lines += [f"  and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
        print(visible_lines("\n".join(lines)), flush=True)


def none_readable(unreadable: Mapping[str, str]) -> str:
    """Say that none of the images could be read, and why the first of them could not, if this process tried it."""
    first = [f"; the first: {visible(path)}: {reason}" for path, reason in [*unreadable.items()][:1]]
    return "".join(["none of the images could be read", *first])


def unreadable_sentence(split: str, count: int, replaced: bool = False) -> str:
    """Say how many images of a split could not be read, and whether other images have replaced them."""
    images = counted(count, "image")
    of = "" if split == "predict" else f" of {split}"
    if replaced:
        return f"{images}{of} could not be read; other images of {split} took their place in the batches."
    return f"{images}{of} could not be read and {'was' if count == 1 else 'were'} left out."
