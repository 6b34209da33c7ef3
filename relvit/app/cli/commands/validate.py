"""`relvit validate`: the loss and accuracy of a checkpoint on the images of val."""

from __future__ import annotations

import math

from lightning import Trainer

from relvit.app.cli.errors import UsageError
from relvit.app.cli.trainer.command_folder import SCORES, baseline, class_counts
from relvit.app.cli.trainer.lightning_cli import Evaluation, evaluate
from relvit.app.cli.typed_words import Arguments
from relvit.app.evaluation.standard_error import plus_minus, with_errors
from relvit.app.training.labels import NOT_FINITE
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.shown_text import counted
from relvit.models import Reach


def validate(evaluation: Evaluation, *, reach: Reach = "trained", verbose: bool = True) -> None:
    """Validate a checkpoint, at any image size (--img_size).

    Args:
        evaluation: The checkpoint's classifier and data.
        verbose: Whether the results are printed.

    Raises:
        UsageError: The options leave no image.
    """
    if evaluation.options["limit_val_batches"] == 0:
        raise UsageError("--trainer.limit_val_batches 0 leaves no image to validate: give a number above 0")
    evaluation.set_reach(reach)
    evaluation.run(report=report, verbose=verbose)
    evaluation.note_part("val")


def report(trainer: Trainer) -> None:
    """Print the size and the number of the images, and the accuracy with its standard error, as `test` does.

    Raises:
        UsageError: no image could be read.
        ValueError: the loss is not finite.
    """
    data, score = trainer.datamodule, trainer.lightning_module.score
    images, name = trainer.lightning_module.evaluated_images, f"val/{score}"
    if not images:
        raise UsageError("none of the images of val could be read: relvit check-data says why")
    if not math.isfinite(trainer.callback_metrics["val/loss"]):
        raise ValueError(NOT_FINITE)
    found = with_errors({name: float(trainer.callback_metrics[name])}, images)
    text = f"{counted(images, 'image')} of val at {data.shape.words()}, {SCORES[score]} {plus_minus(found, name)}"
    rank_zero_print(text + baseline(class_counts(trainer, "val")))


def main(given: Arguments) -> None:
    """Run the command line."""
    evaluate(validate, given)
