"""`relvit test`: print metrics, the worst classes and mistakes; `evaluation/report.py` writes tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from lightning import Trainer

from relvit.app.cli.errors import UsageError
from relvit.app.cli.outputs import print_table
from relvit.app.cli.trainer.command_folder import SCORES, baseline, files_line, new_folder, settings, write_summary
from relvit.app.cli.trainer.lightning_cli import Evaluation, evaluate, refuse_other_images
from relvit.app.cli.typed_words import Arguments
from relvit.app.evaluation import Corruptions, EvaluationReport, absent_classes
from relvit.app.evaluation.standard_error import plus_minus, with_errors
from relvit.app.training.class_metrics import AnyClassMetrics
from relvit.app.training.run.data_record import none_readable
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.shown_text import counted
from relvit.models import Reach

# The table shows all classes if there are at most `ALL`, otherwise the `WORST` classes with the lowest F1.
ALL, WORST = 20, 10


def test(
    evaluation: Evaluation,
    *,
    runs: str = "runs",
    split: Literal["train", "val", "test"] = "test",
    robustness: str | None = None,
    reach: Reach = "trained",
    mirror: bool = False,
    verbose: bool = True,
) -> None:
    """Test a checkpoint: metrics per class, confusion matrix, worst mistakes.

    Args:
        evaluation: The checkpoint's classifier and data.
        split: The images to use: train (without augmentation), val or test.
        robustness: Test on a robustness set, a folder with CLASS/IMAGE or CORRUPTION/SEVERITY/CLASS/IMAGE; only its
            classes can be predicted.
        verbose: Whether the overall results are printed as a table.
    """
    data = evaluation.datamodule
    if (reason := data.missing(split)) and data.missing("val") is None:
        # If the user gives other images, as by `--root photos/test`, do not suggest a part of them that is held out as
        # val.
        is_part = "data.root" in evaluation.given.values and data.held_out()
        raise UsageError(reason if is_part else f"{reason}; or test on the images of val, by --split val")
    data.evaluate_on(split)
    evaluation.set_reach(reach)
    evaluation.model.mirror = mirror
    if robustness is not None:
        evaluation.model.absent = absent_classes(data)
    with new_folder(runs, "test") as folder:
        found = EvaluationReport(folder)
        path = evaluation.checkpoint.path
        evaluation.run([found], folder, lambda trainer: report(trainer, found, folder, path, reach), verbose=verbose)
    evaluation.note_part(split)


def report(trainer: Trainer, found: EvaluationReport, folder: Path, checkpoint: str, reach: str) -> None:
    """Write `summary.json` and print metrics of the classes, in the main process.

    Raises:
        UsageError: no image could be read.
    """
    data = trainer.datamodule
    if not found.results:
        raise UsageError(none_readable(data.unreadable.get(data.evaluated_split, {})))
    summary = {"checkpoint": checkpoint, "reach": reach, "split": data.evaluated_split} | settings(trainer)
    if hasattr(data, "conditions"):
        summary["robustness"] = data.root
    # A test on corruptions uses each image several times, corrupted in different ways. So the results are not
    # independent, and get no standard errors.
    summary |= found.results if found.corruptions else with_errors(found.results, found.results["images"])
    write_summary(folder, summary, trainer)
    print_classes(found.classes, data.class_names)
    if found.corruptions is not None:
        print_corruptions(found.corruptions)
    shown = {"test/acc1": SCORES["acc1"], "test/f1": "mean F1 of the classes", "test/map": SCORES["map"]}
    shown |= {"test/calibration_error": "calibration error"}
    shown = ", ".join(f"{text} {plus_minus(summary, name)}" for name, text in shown.items() if name in summary)
    if "test/acc1" in summary:
        shown += baseline(found.classes.count)
    images = f"{counted(summary['images'], 'image')} of {data.evaluated_split} at {data.shape.words()}"
    rank_zero_print(f"{images}, {shown}\n{files_line(folder)}")


def print_classes(metrics: AnyClassMetrics, class_names: Sequence[str]) -> None:
    """Print a row for each class; for more than 20 classes, only the ten classes with images and the lowest F1."""
    rows, title = np.arange(len(class_names)), None
    if len(rows) > ALL:
        known = rows[metrics.count > 0]
        rows = known[np.argsort(metrics.f1[known], kind="stable")][:WORST]
        title = f"the {counted(len(rows), 'class')} with the lowest F1 of {len(class_names)}"
    cells = (
        [class_names[row], str(metrics.count[row])]
        + ["-" if np.isnan(column[row]) else f"{column[row]:.4f}" for column in metrics[1:]]
        for row in rows
    )
    print_table(("class", *metrics._fields), cells, title)


def print_corruptions(corruptions: Corruptions) -> None:
    """Print the accuracy of each corruption by severity, and the mean errors over all corruptions."""
    print_table(*corruptions.table(), "accuracy by corruption and severity")
    results = corruptions.results
    line = f"mean corruption error {results['test/mean_corruption_error']:.4f} (not normalised)"
    rank_zero_print(line + (f", mCE {100 * results['test/mce']:.1f} (AlexNet 100)" if "test/mce" in results else ""))


def main(given: Arguments) -> None:
    """Run the command line."""
    if (root := given.values.get("robustness")) is None:
        evaluate(test, given)
        return
    refuse_other_images(given, ("data", "data.root", "split"), f"--robustness {root}")
    # Import the class only here: the parser's help lists all imported data modules as choices of `--data`, and this one
    # is not for users.
    from relvit.app.data.modules.robustness_sets import RobustnessData

    evaluate(test, given, RobustnessData, root=root)
