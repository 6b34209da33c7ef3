"""`relvit predict CKPT PATH ...`: the classes of images in `predictions.csv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from relvit.cli.aliases import option
from relvit.cli.errors import UsageError
from relvit.cli.trainer.evaluation import Evaluation, NamedImages, evaluate, refuse_other_images
from relvit.cli.trainer.folder import new_folder
from relvit.data.labels import counts_text
from relvit.evaluation import MirrorAverage
from relvit.models import Reach
from relvit.training import PredictionTable
from relvit.utils.progress import rank_zero_print


def predict(
    evaluation: Evaluation,
    runs: str = "runs",
    reach: Reach = "trained",
    mirror: bool = False,
    step_maps: bool = False,
) -> None:
    """Write the classes of each image into predictions.csv.

    Args:
        evaluation: The checkpoint's classifier and the images.
        runs: The folder in which the results get a folder of their own.
        mirror: Average the probabilities of each image and its mirror image.
        step_maps: Draw how many steps each patch took (for models that halt: relvit_universal_* trained with
            --model.model_kwargs.halting act); the table gets the mean of each image.
    """
    evaluation.set_reach(reach)
    model = evaluation.model
    if step_maps and not getattr(model.net, "counts_steps", False):
        raise UsageError(
            f"--step_maps is not for {model.hparams.model}: it is for models that halt: relvit_universal_* trained "
            "with --model.model_kwargs.halting act"
        )
    with new_folder(runs, "predict") as folder:
        table = PredictionTable(folder / "predictions.csv", model.hparams.class_names, step_maps)
        callbacks = [table, MirrorAverage()] if mirror else [table]
        evaluation.run(callbacks, folder, lambda trainer: report(table, folder), return_predictions=False)


def report(table: PredictionTable, folder: Path) -> None:
    """Print where the predictions are, and how many images have each class.

    Raises:
        UsageError: there are none.
    """
    if not table.count:
        raise UsageError(f"none of the images could be read; {folder / 'unreadable.csv'} says why")
    classes = f": {counts_text(dict(table.classes.most_common()))}" if table.classes else ""
    rank_zero_print(f"{table.count} predictions in {table.path}{classes}")


def main(arguments: Sequence[str], lists: Mapping[str, list[str]]) -> None:
    """Run the command line."""
    if (given := option(arguments, "--paths")) is not None:
        raise UsageError(f"name the images without an option: relvit predict CKPT {given}")
    images, paths = None, lists.get("paths")
    if paths:
        named = f"{paths[0]} (and {len(paths) - 1} more)" if len(paths) > 1 else paths[0]
        refuse_other_images(arguments, ("--data", "--data.root"), named)
        # Not above: the parser's help would list it among the kinds of data.
        from relvit.data.modules.paths import ImagePathsData

        images = NamedImages(ImagePathsData, {"paths": paths}, without="on_error")
    # Whatever the training did about them, one broken file shall not cost the others their predictions.
    evaluate(predict, arguments, images, {"on_error": "skip"})
