"""Send results and figures of a training to TensorBoard, Weights & Biases, MLflow and other loggers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Trainer
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from PIL import Image

FIGURES = ("training_images.png", "curves.png", "positions.png")


def send_results(trainer: Trainer, folder: Path, summary: Mapping[str, Any]) -> None:
    """Send a run's figures, and the results in its `summary.json`, to Weights & Biases, MLflow and TensorBoard.

    Results such as test/acc1 are named summary/test/acc1. The main process calls this function after the training.
    """
    figures = [path for name in FIGURES if (path := folder / name).is_file()]
    numbers = {f"summary/{name}": value for name, value in summary.items() if "/" in name}
    for logger in trainer.loggers:
        logger.log_metrics(numbers)
        for path in figures:
            if isinstance(logger, WandbLogger):
                logger.log_image(path.stem, [str(path)])
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifact(logger.run_id, str(path))
        logger.finalize("success")
    if (folder / "tensorboard").is_dir():
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder / "tensorboard") as writer:
            for name, number in numbers.items():
                writer.add_scalar(name, number)
            for path in figures:
                with Image.open(path) as image:
                    writer.add_image(path.stem, np.asarray(image.convert("RGB")), dataformats="HWC")
