"""Lines that `relvit fit`, `test` and `predict` print at start and end, summary.json, and the commands to go on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import nn

from relvit.cli.errors import UsageError
from relvit.cli.fit.loggers import send_results
from relvit.data import ImageData
from relvit.data.labels import counts_text
from relvit.data.modules.base import Split
from relvit.evaluation import ClassMetrics, Corruptions, EvaluationReport
from relvit.evaluation.pictures import NotApplicableError, draw
from relvit.evaluation.standard_error import plus_minus, with_errors
from relvit.training import DataRecord, ImageClassifier, PredictionTable, RunCheckpoints, load_classifier
from relvit.training.multi_label import MultiLabelMetrics
from relvit.utils.messages import one_line
from relvit.utils.progress import rank_zero_print

# All classes up to so many are shown, else the worst few.
ALL, WORST = 20, 10
# The metric by which the best checkpoint is chosen, see `ImageClassifier.score`.
SCORES = {"acc1": "accuracy", "map": "mean average precision"}

Kind = TypeVar("Kind", bound=Callback)


def describe_training(model: ImageClassifier, data: ImageData) -> str:
    """Describe in a line what is trained on what: the model, its size, the classes and the images."""
    size = sum(parameter.numel() for parameter in model.net.parameters()) / 1e6
    sizes = [" x ".join(map(str, given)) for given in (data.img_size, *(data.train_sizes or ()))]
    trained = f" (trained at {', '.join(sizes[1:])})" if data.train_sizes else ""
    images = f"{sizes[0]} px x {data.in_chans}{trained}"
    if data.native:
        patch = " x ".join(map(str, data.patch_size))
        images = f"native shapes of up to {data.token_budget} patches of {patch} px x {data.in_chans}"
    positions = "" if model.hparams.retrofit is None else ", retrofitted"
    about = f"{model.hparams.model}{positions} ({size:.2f} M parameters), {data.num_classes} classes, {images}"
    return f"{about}, batch {data.batch_size}"


def report_fit(
    trainer: Trainer, checkpoints: RunCheckpoints, folder: Path, seed: Any, seconds: float, since: int, same_run: bool
) -> None:
    """Test the best checkpoint where there are test images, write `summary.json`, `positions.png`, print the result.

    `positions.png` are the relative tables of that checkpoint, where it has some.

    All processes call this. `since` is the number of epochs that had been trained before this training went on; with
    `same_run` they are in the same folder, so that the best checkpoint is that of them, too.
    """
    model, data = trainer.lightning_module, trainer.datamodule
    score, what = model.score, SCORES[model.score]
    best, trained = checkpoints.best_model_path, trainer.current_epoch - since
    summary: dict[str, Any] = {
        "model": model.hparams.model,
        "seed": seed,
        "epochs": trainer.current_epoch,
        "minutes": round(seconds / 60, 2),
        "effective_batch": model.plan.batch,
        "lr": model.plan.lr,
        "steps": model.plan.steps,
        "warmup_steps": model.plan.warmup,
        f"val/{score}": float(checkpoints.best_model_score),
        "best_epoch": checkpoints.best_epoch,
        **{f"{split}/images": len(data.dataset(split)) for split in ("train", "val")},
    }
    summary = with_errors(summary, summary["val/images"])
    lines = [f"Trained {trained} {'epoch' if trained == 1 else 'epochs'} in {seconds / 60:.1f} min."]
    for stop in trainer.early_stopping_callbacks:
        if stop.stopped_epoch and stop.stopped_epoch + 1 == trainer.current_epoch:
            lines.append(f"Stopped early: patience {stop.patience} with {stop.monitor} has run out.")
            summary["stopped_early"] = True
    resumed = f" since resuming after epoch {since}" if since and not same_run else ""
    lines.append(
        f"Best validation {what}{resumed}: {plus_minus(summary, f'val/{score}')}, epoch {checkpoints.best_epoch}"
        f"{_baseline(_counts(data, 'val'))}"
    )
    # A test image that cannot be read stops the test, not this.
    rank_zero_print("\n".join(lines))
    lines = []
    if data.has_test:
        results = trainer.test(model, data, ckpt_path=best, verbose=False)[0]
        results = with_errors(results, len(data.dataset("test")))
        summary |= results | {"test/images": len(data.dataset("test"))}
        more = {"test/acc5": "top-5", "test/f1": "mean F1"}
        more = "".join(f", {text} {plus_minus(results, name)}" for name, text in more.items() if name in results)
        more += _baseline(_counts(data, "test"))
        lines.append(f"Test {what} of that checkpoint: {plus_minus(results, f'test/{score}')}{more}")
    if model.transfer is not None:
        summary["pretrained"] = model.transfer.plain()
    if rank_zero_only.rank == 0:
        _write_summary(folder, summary, trainer)
        _draw_positions(folder / "positions.png", best, data)
        send_results(trainer, folder, summary)
        rank_zero_print("\n".join([*lines, _files(folder), "Next:", *_suggestions(model.net, data, best)]))


def report_test(trainer: Trainer, folder: Path, checkpoint: str, reach: str) -> None:
    """Write `summary.json` and print metrics of the classes, in the main process; options are as the user gave them.

    Raises:
        UsageError: no image could be read.
    """
    report, data = _callback(trainer, EvaluationReport), trainer.datamodule
    if not report.results:
        raise UsageError(f"none of the images could be read; {folder / 'unreadable.csv'} says why")
    summary = {"checkpoint": checkpoint, "split": data.evaluated_split, "img_size": list(data.img_size), "reach": reach}
    if hasattr(data, "conditions"):
        summary["robustness"] = data.root
    if data.native:
        summary["max_tokens"] = data.token_budget
    # Corruptions show the same images again and again: such results are no independent draws.
    summary |= report.results if report.corruptions else with_errors(report.results, report.results["images"])
    _write_summary(folder, summary, trainer)
    print_classes(report.classes, data.class_names)
    if report.corruptions is not None:
        print_corruptions(report.corruptions)
    shown = {"test/acc1": SCORES["acc1"], "test/f1": "mean F1 of the classes", "test/map": SCORES["map"]}
    shown |= {"test/calibration_error": "calibration error"}
    shown = ", ".join(f"{text} {plus_minus(summary, name)}" for name, text in shown.items() if name in summary)
    shown += _baseline(None if data.multi_label else report.classes.count)
    rank_zero_print(f"{summary['images']} images of {data.evaluated_split}, {shown}\n{_files(folder)}")


def report_predict(trainer: Trainer, folder: Path) -> None:
    """Print where the predictions are, and how many images have each class; in the main process.

    Raises:
        UsageError: there are none.
    """
    table = _callback(trainer, PredictionTable)
    if not table.count:
        raise UsageError(f"none of the images could be read; {folder / 'unreadable.csv'} says why")
    classes = f": {counts_text(dict(table.classes.most_common()))}" if table.classes else ""
    rank_zero_print(f"{table.count} predictions in {table.path}{classes}")


def print_classes(metrics: ClassMetrics | MultiLabelMetrics, class_names: Sequence[str]) -> None:
    """Print a row for each class; of more than 20 the ten with the lowest F1 among those that have images."""
    rows, title = np.arange(len(class_names)), None
    if len(rows) > ALL:
        known = rows[metrics.count > 0]
        rows = known[np.argsort(metrics.f1[known], kind="stable")][:WORST]
        title = f"the {len(rows)} classes with the lowest F1 of {len(class_names)}"
    table = Table(title=title, title_justify="left")
    for name in ("class", *metrics._fields):
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in rows:
        values = ("-" if np.isnan(column[row]) else f"{column[row]:.4f}" for column in metrics[1:])
        table.add_row(class_names[row], str(metrics.count[row]), *values)
    # No markup: names may hold brackets.
    Console(highlight=False, markup=False).print(table)


def print_corruptions(corruptions: Corruptions) -> None:
    """Print the accuracy of each corruption by severity, and what is the mean of all."""
    header, rows = corruptions.table()
    table = Table(title="accuracy by corruption and severity", title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name == "corruption" else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    results = corruptions.results
    line = f"mean corruption error {results['test/mean_corruption_error']:.4f} (not normalised)"
    rank_zero_print(line + (f", mCE {100 * results['test/mce']:.1f} (AlexNet 100)" if "test/mce" in results else ""))


def _counts(data: ImageData, split: Split) -> np.ndarray | None:
    """Count the images of each class; None with several labels, or where a dataset does not list its labels."""
    labels = getattr(data.dataset(split), "targets", None)
    return None if data.multi_label or labels is None else np.bincount(labels)


def _baseline(counts: np.ndarray | None) -> str:
    """Describe the accuracy of always naming the commonest class."""
    return "" if counts is None else f"; always the commonest class: {counts.max() / counts.sum():.4f}"


def _callback(trainer: Trainer, kind: type[Kind]) -> Kind:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


def _write_summary(folder: Path, summary: dict[str, Any], trainer: Trainer) -> None:
    if counts := _callback(trainer, DataRecord).counts:
        summary["unreadable"] = counts
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _draw_positions(target: Path, best: str, data: LightningDataModule) -> None:
    try:
        image = torch.empty(len(data.mean), *data.img_size)
        draw("tables", load_classifier(best).net, image).savefig(target)
    except NotApplicableError:
        pass
    # Memory, fonts and position modules of users may all fail in their own way; the training itself is done.
    except Exception as error:
        rank_zero_print(f"Note: {target.name} could not be drawn: {one_line(error)}")


def _files(folder: Path) -> str:
    return f"Files: {folder} ({', '.join(sorted(path.name for path in folder.glob('[!.]*')))})"


def _suggestions(net: nn.Module, data: LightningDataModule, best: str) -> list[str]:
    """Return commands that work as printed."""
    path = Path(best).relative_to(Path.cwd()) if Path(best).is_relative_to(Path.cwd()) else best
    path = shlex.quote(str(path))
    lines = []
    if data.native:
        # Half as many tokens more, in images of the same shapes.
        lines.append(f"  relvit validate {path} --data.max_tokens {round(1.5 * data.token_budget)}")
    elif getattr(net, "dynamic_img_size", False):
        # A quarter larger, in whole patches: objects grow in patches, too, and accuracy falls with a large factor.
        patch = net.patch_embed.patch_size
        trained = list(data.img_size)
        larger = [max(side + p, round(1.25 * side / p) * p) for side, p in zip(trained, patch, strict=True)]
        first, second = (str(size).replace(" ", "") for size in (trained, larger))
        lines.append(f"  relvit validate {path} --img_size '{second}'")
        lines.append(f"  relvit resolutions {path} --sizes '{first}' '{second}'")
    lines.append(f"  relvit predict {path} FOLDER_OF_IMAGES")
    return [*lines, "Also of a checkpoint: relvit show, calibrate, probe, embed, export, publish; each has --help"]
