"""What came out of `relvit fit`, `test` and `predict`, where it is and what is next."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, TypeVar

from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from relvit.cli.commands.class_table import show_classes
from relvit.cli.errors import UsageError
from relvit.evaluation import EvaluationReport
from relvit.training import DataRecord, PredictionTable, RunCheckpoints

Kind = TypeVar("Kind", bound=Callback)


@rank_zero_only
def say(text: str) -> None:
    """Print, in the main process alone."""
    print(text, flush=True)


def tell_fit(
    trainer: Trainer,
    checkpoints: RunCheckpoints,
    folder: Path,
    seed: Any,
    seconds: float,
    since: int,
    whole: bool,
) -> None:
    """Test the best checkpoint where there are test images, write `summary.json` and say what is next.

    All processes call this.

    Args:
        trainer: which has trained.
        checkpoints: that it has written, a best one among them.
        folder: of the run.
        seed: of the run.
        seconds: that the training took.
        since: epochs that had been trained before this training went on; 0 where it began afresh.
        whole: whether the best checkpoint is that of these epochs too.
    """
    model, data = trainer.lightning_module, trainer.datamodule
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
        "val/acc1": float(checkpoints.best_model_score),
    }
    resumed = f" since resuming after epoch {since}" if since and not whole else ""
    lines = [f"Trained {trained} {'epoch' if trained == 1 else 'epochs'} in {seconds / 60:.1f} min."]
    for stop in trainer.early_stopping_callbacks:
        if stop.stopped_epoch and stop.stopped_epoch + 1 == trainer.current_epoch:
            lines.append(f"Stopped early: patience {stop.patience} with {stop.monitor} has run out.")
            summary["stopped_early"] = True
    lines.append(f"Best validation accuracy{resumed}: {summary['val/acc1']:.4f}")
    if data.has_test:
        results = trainer.test(model, data, ckpt_path=best, verbose=False)[0]
        summary.update(results)
        top5 = f", top-5 {results['test/acc5']:.4f}" if "test/acc5" in results else ""
        lines.append(f"Test accuracy of that checkpoint: {results['test/acc1']:.4f}{top5}")
    if model.transfer is not None:
        summary["pretrained"] = model.transfer.plain()
    summary |= _unreadable(trainer)
    if rank_zero_only.rank == 0:
        _write_summary(folder, summary)
        files = ", ".join(sorted(path.name for path in folder.glob("[!.]*")))
        lines += [f"Files: {folder} ({files})", "Next:", *_suggestions(model.net, data, best)]
    say("\n".join(lines))


def tell_test(trainer: Trainer, folder: Path, checkpoint: str) -> None:
    """Write `summary.json`, show the classes and say where the rest is.

    Args:
        trainer: which has tested.
        folder: of the run.
        checkpoint: as the user gave it.

    Raises:
        UsageError: no image could be read.
    """
    report, data = _callback(trainer, EvaluationReport), trainer.datamodule
    if not report.results:
        raise UsageError(f"none of the images could be read; {folder / 'unreadable.csv'} says why")
    summary: dict[str, Any] = {"checkpoint": checkpoint, "split": data.evaluated_split, "img_size": list(data.img_size)}
    summary |= report.results | _unreadable(trainer)
    _write_summary(folder, summary)
    show_classes(report.classes, data.class_names)
    say(
        f"{summary['images']} images of {data.evaluated_split}, mean F1 of the classes {summary['test/f1']:.4f}, "
        f"calibration error {summary['test/calibration_error']:.4f}"
    )
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    say(f"Files: {folder} ({files})")


def tell_predict(trainer: Trainer, folder: Path) -> None:
    """Say where the predictions are.

    Raises:
        UsageError: there are none.
    """
    table = _callback(trainer, PredictionTable)
    if not table.count:
        raise UsageError(f"none of the images could be read; {folder / 'unreadable.csv'} says why")
    say(f"{table.count} predictions in {table.path}")


def _callback(trainer: Trainer, kind: type[Kind]) -> Kind:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


def _unreadable(trainer: Trainer) -> dict[str, Any]:
    counts = _callback(trainer, DataRecord).counts
    return {"unreadable": counts} if counts else {}


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _suggestions(net: nn.Module, data: LightningDataModule, best: str) -> list[str]:
    """Commands that work as printed."""
    path = Path(best).relative_to(Path.cwd()) if Path(best).is_relative_to(Path.cwd()) else best
    path = shlex.quote(str(path))
    lines = []
    if getattr(net, "dynamic_img_size", False):
        # A quarter larger, in whole patches: objects grow in patches, too, and accuracy falls with a large factor.
        patch = net.patch_embed.patch_size
        trained = list(data.img_size)
        larger = [max(side + p, round(1.25 * side / p) * p) for side, p in zip(trained, patch, strict=True)]
        first, second = (str(size).replace(" ", "") for size in (trained, larger))
        lines.append(f"  relvit validate {path} --img_size '{second}'")
        lines.append(f"  relvit resolutions {path} --sizes '{first}' '{second}'")
    return [*lines, f"  relvit predict {path} FOLDER_OF_IMAGES"]
