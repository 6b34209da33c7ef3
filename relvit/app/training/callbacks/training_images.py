"""Draw the first training images, augmented as the model sees them (`training_images.png` in a run's folder)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from lightning import Callback, LightningModule, Trainer

from relvit.app.data import ImageData
from relvit.app.data.batches import images_of
from relvit.app.data.class_labels import label_text
from relvit.app.plots import picture_of, plot_sheet
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.seeding import run_seed, seeded
from relvit.app.utils.shown_text import one_line

SHOWN = 20


class TrainingImages(Callback):
    """Draw the first training images, augmented and with the names of their classes, when a training starts.

    Mixup and CutMix are not applied. The training draws the same random numbers as without this callback, and continues
    if the picture cannot be drawn. An existing picture is not replaced.

    Args:
        path: The PNG file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule
        if not trainer.is_global_zero or self.path.exists() or not isinstance(data, ImageData):
            return
        try:
            with seeded(run_seed()):
                pictures, names = zip(*islice(_training_pictures(data), SHOWN), strict=True)
            mixed = ", before mixing" if pl_module.mixing is not None else ""
            plot_sheet(pictures, names, self.path, title=f"training images as the model sees them{mixed}")
        # Files, transforms and fonts may raise errors of any type. Only note the error here: if it matters to the
        # training, the training itself will raise it.
        except Exception as error:
            rank_zero_print(f"Note: {self.path.name} could not be drawn: {one_line(error)}")


def _training_pictures(data: ImageData) -> Iterator[tuple[np.ndarray, str]]:
    """Yield pictures and class names of the training's dataloader, without worker processes."""
    workers, data.num_workers = data.num_workers, 0
    try:
        loader = data.train_dataloader()
    finally:
        data.num_workers = workers
    for images, labels in loader:
        for image, label in zip(images_of(images), labels, strict=True):
            classes = tuple(label.nonzero()[:, 0].tolist()) if label.ndim else int(label)
            yield picture_of(image, data.mean, data.std), label_text(classes, data.class_names)
