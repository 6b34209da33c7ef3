"""`relvit calibrate`: a checkpoint with a temperature, or with thresholds of several labels, fitted to val."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from relvit.app.cli.outputs import print_table
from relvit.app.evaluation import ChosenThresholds
from relvit.app.evaluation import calibrate as calibrate_checkpoint
from relvit.app.utils.devices import find_device
from relvit.app.utils.files import is_address
from relvit.app.utils.masks import mask_secrets
from relvit.app.utils.number_types import BatchSize
from relvit.app.utils.progress import with_bar
from relvit.app.utils.shown_text import counted, without_secrets

# A temperature, or thresholds, fitted to fewer than this number of images may be worse than none: `calibrate` prints a
# warning.
FEW = 200


def calibrate(
    ckpt_path: str,
    *,
    output: str | None = None,
    split: Literal["train", "val", "test"] = "val",
    root: str | None = None,
    batch_size: BatchSize | None = None,
    device: str = "auto",
    data: str | None = None,
    data_args: Mapping[str, Any] | None = None,
) -> None:
    """Fit a temperature to validation images, and write the checkpoint with the temperature in it.

    All commands that take the new checkpoint divide the logits by this temperature, except a training that resumes or
    starts from the checkpoint, or has it as its teacher. For a model with several labels per image, the command chooses
    the threshold of each class instead.

    Args:
        ckpt_path: The checkpoint to calibrate, such as runs/RUN/checkpoints/best.ckpt.
        output: The file to write; by default beside the checkpoint, such as best_calibrated.ckpt beside best.ckpt.
        split: The images to use, which the model must not have been trained on.
    """
    if output is None:
        place = Path(without_secrets(ckpt_path))
        output = f"{place.stem.removesuffix('_calibrated')}_calibrated.ckpt"
        output = output if is_address(ckpt_path) else str(place.with_name(output))
    bar = partial(with_bar, what="calibrating")
    found = calibrate_checkpoint(ckpt_path, output, split, root, batch_size, find_device(device), bar, data, data_args)
    images = f"{counted(found.images, 'image')} of {split}"
    if isinstance(found, ChosenThresholds):
        print(f"{images}: {counted(len(found.thresholds), 'threshold')} of the best F1 of each class")
        rows = [("mean F1", found.f1)]
    else:
        print(f"{images}: temperature {found.temperature:.4f}")
        rows = [("accuracy", (found.accuracy, found.accuracy))]
        rows += [("negative log-likelihood", found.nll), ("calibration error", found.error)]
    print_table(
        ("", "as trained", "calibrated"), ([name, *(f"{value:.4f}" for value in values)] for name, values in rows)
    )
    if found.images < FEW:
        print("So few images say little: compare both checkpoints by `relvit test`, and keep the better one")
    if found.next_split == split:
        print(f"Only {split} is left to test it on, the images of the fit: the figures there are too good")
    options = {"--split": None if found.next_split == "test" else found.next_split, "--root": root, "--data": data}
    for name, value in mask_secrets(data_args or {}).items():
        options[f"--data.{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    given = [part for name, value in options.items() if value is not None for part in (name, value)]
    print(f"written: {output}. Next:\n  {shlex.join(['relvit', 'test', output, *given])}", flush=True)
