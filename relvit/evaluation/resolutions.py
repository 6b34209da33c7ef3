"""Evaluate one checkpoint at several image sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning import Trainer

from relvit.data import parse_size
from relvit.models import check_image_size
from relvit.training import Checkpoint

Size = int | tuple[int, int]


def evaluate_sizes(
    ckpt_path: str,
    sizes: Sequence[Size],
    split: Literal["train", "val", "test"] = "val",
    root: str | None = None,
    batch_size: int | None = None,
    accelerator: str = "auto",
) -> list[dict[str, Any]]:
    """Evaluate a checkpoint of `relvit fit` at each size, without changing or interpolating anything in the model.

    A model that was trained on native shapes gets images of one size as well.

    Args:
        ckpt_path: the checkpoint.
        sizes: image sizes in pixels, each one number or (height, width), multiples of the patch.
        split: 'train' (without augmentation), 'val' or 'test'.
        root: the data's folder, where it is no longer what the checkpoint remembers.
        batch_size: images per batch; None: as in training.
        accelerator: Lightning's name of the device, such as 'cpu' or 'gpu'.

    Returns:
        For each size 'height', 'width', 'acc1', 'acc5' (with five classes or more) and 'loss'.

    Raises:
        FileNotFoundError, ValueError: a checkpoint, folder or size that does not fit.
    """
    if split not in ("train", "val", "test"):
        raise ValueError(f"split must be 'train', 'val' or 'test', got {split!r}")
    checkpoint = Checkpoint.read(ckpt_path)
    options = {"root": root, "batch_size": batch_size, "native": False}
    modules = [checkpoint.data_module(img_size=size, **options) for size in sizes]
    classifier = checkpoint.classifier()
    # All of them, before the first one takes its time.
    for size in sizes:
        check_image_size(classifier.net, parse_size(size), classifier.hparams.in_chans, classifier.hparams.img_size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator=accelerator, devices=1, **quiet)
    rows = []
    while modules:
        # Each goes with its size: the decoded images of all of them together may not fit into the memory.
        data = modules.pop(0)
        data.evaluate_on(split)
        results = trainer.test(classifier, data, verbose=False)[0]
        row = {name.removeprefix("test/"): value for name, value in results.items()}
        rows.append({"height": data.img_size[0], "width": data.img_size[1], **row})
    return rows
