"""One checkpoint, several image sizes: accuracy as a function of the resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning import Trainer

from relvit.data import parse_size
from relvit.data.modules.registry import own_data_module
from relvit.models import check_image_size
from relvit.training.checkpoints.checkpoint import classifier_of
from relvit.training.checkpoints.file import KEY, read_checkpoint

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
    content = read_checkpoint(ckpt_path)
    remembered = content[KEY]["data"]
    data_class = own_data_module(remembered["class_path"])
    if data_class is None:
        raise ValueError(
            f"{ckpt_path} was trained with the data module {remembered['class_path']}, which is not one of relvit.data"
        )
    classifier = classifier_of(content)
    # All of them, before the first one takes its time.
    for size in sizes:
        check_image_size(classifier.net, parse_size(size), classifier.hparams.in_chans, classifier.hparams.img_size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator=accelerator, devices=1, **quiet)
    rows = []
    for size in sizes:
        changes = {"img_size": size, "root": root, "batch_size": batch_size}
        arguments = remembered["init_args"] | {key: value for key, value in changes.items() if value is not None}
        try:
            data = data_class(**arguments)
        except TypeError as error:  # an argument that there is not
            raise ValueError(f"{ckpt_path} does not make a {data_class.__name__}: {error}") from error
        data.evaluate_on(split)
        results = trainer.test(classifier, data, verbose=False)[0]
        row = {name.removeprefix("test/"): value for name, value in results.items()}
        rows.append({"height": data.img_size[0], "width": data.img_size[1], **row})
    return rows
