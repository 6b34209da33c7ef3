"""`relvit predict CKPT PATH ...`: the classes of images in `predictions.csv`; broken images are skipped."""

from __future__ import annotations

from typing import Any

from lightning import Trainer

from relvit.app.cli.errors import UsageError
from relvit.app.cli.trainer.command_folder import new_folder, settings, write_summary
from relvit.app.cli.trainer.lightning_cli import Evaluation, evaluate, refuse_other_images
from relvit.app.cli.trainer.own_data import data_in
from relvit.app.cli.typed_words import Arguments
from relvit.app.data.class_labels import counts_text
from relvit.app.evaluation import PredictionTable
from relvit.app.training.run.data_record import none_readable
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.shown_text import counted
from relvit.models import Reach


def predict(
    evaluation: Evaluation,
    *,
    runs: str = "runs",
    reach: Reach = "trained",
    mirror: bool = False,
    step_maps: bool = False,
) -> None:
    """Write the classes of each image into predictions.csv.

    Args:
        evaluation: The checkpoint's classifier and the images.
        step_maps: Draw the number of steps of each patch, and add each image's mean to the table; for models with
            adaptive halting: relvit_universal_* trained with --model.model_kwargs.halting act.
    """
    evaluation.set_reach(reach)
    model = evaluation.model
    model.mirror = mirror
    if step_maps and not getattr(model.net, "counts_steps", False):
        raise UsageError(
            f"--step_maps is not for {model.hparams.model}: it is for models that halt: relvit_universal_* trained "
            "with --model.model_kwargs.halting act"
        )
    given = evaluation.given
    if data_in(given.words) is None and given.values.keys().isdisjoint(("paths", "data.root", "data.predict")):
        rank_zero_print("No paths are given: these are the images of test, or else of val, of the training's data.")
    with new_folder(runs, "predict") as folder:
        table = PredictionTable(folder / "predictions.csv", evaluation.checkpoint.class_names(), step_maps)
        known = {"checkpoint": evaluation.checkpoint.path, "reach": reach}
        evaluation.run([table], folder, lambda trainer: report(trainer, table, known), return_predictions=False)


def report(trainer: Trainer, table: PredictionTable, known: dict[str, str]) -> None:
    """Write `summary.json`, and print up to ten predictions, or else the number of images in each class, and the file.

    Raises:
        UsageError: there are no predictions.
    """
    if not table.count:
        raise UsageError(none_readable(trainer.datamodule.unreadable.get("predict", {})))
    write_summary(table.path.parent, known | settings(trainer) | {"images": table.count}, trainer)
    if table.count <= len(table.first):
        rank_zero_print("\n".join(table.first))
    by_class = table.classes and table.count > len(table.first)
    classes = f"; images of each class: {counts_text(dict(table.classes.most_common()))}" if by_class else ""
    rank_zero_print(f"{counted(table.count, 'prediction')} in {table.path}{classes}")


def main(given: Arguments, paths: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        given: The options.
        paths: Image files, folders (with all below them) and patterns such as 'photos/*.jpg'; by default the images of
            test (or val, if there is no test) of the checkpoint's training data.
    """
    # A file that cannot be read must not stop the prediction of other files, even if such files stopped the training.
    changes: dict[str, Any] = {"on_error": "skip"}
    if not paths:
        evaluate(predict, given, **changes)
        return
    named = f"{paths[0]} (and {len(paths) - 1} more)" if len(paths) > 1 else paths[0]
    refuse_other_images(given, ("data", "data.root"), named)
    # Import the class only here: the parser's help lists all imported data modules as choices of `--data`, and this one
    # is not for users.
    from relvit.app.data.modules.paths import ImagePathsData

    evaluate(predict, given, ImagePathsData, paths=paths, **changes)
