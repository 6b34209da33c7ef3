"""Print the start and the end of `relvit fit`; test the best checkpoint, write `summary.json`, suggest commands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from relvit.app.cli.trainer.command_folder import (
    SCORES,
    baseline,
    class_counts,
    files_line,
    write_summary,
)
from relvit.app.data import ImageData
from relvit.app.data.registry import class_path_of
from relvit.app.evaluation.pictures import NotApplicableError, draw
from relvit.app.evaluation.standard_error import plus_minus, with_errors
from relvit.app.plots.style import save_figure
from relvit.app.training import ImageClassifier, RunCheckpoints, load_classifier
from relvit.app.training.labels import Labels
from relvit.app.training.run.send_results import send_results
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.shown_text import counted, one_line, size_text, without_secrets


def describe_training(model: ImageClassifier, data: ImageData) -> str:
    """Describe the training in a line: the model, its size, the classes and the images."""
    size = sum(parameter.numel() for parameter in model.net.parameters()) / 1e6
    sizes = ", ".join(" x ".join(map(str, given)) for given in data.train_sizes or ())
    images = f"{data.shape.words()} x {data.in_chans}" + (f" (trained at {sizes})" if sizes else "")
    positions = "" if model.hparams.retrofit is None else ", retrofitted"
    about = (
        f"{model.hparams.model}{positions} ({size:.2f} M parameters), {counted(data.num_classes, 'class')}, {images}"
    )
    return f"{about}, batch {data.batch_size}"


def report_fit(
    trainer: Trainer, checkpoints: RunCheckpoints, folder: Path, seed: Any, seconds: float, since: int, same_run: bool
) -> None:
    """Test the best checkpoint (if there are test images), write `summary.json`, `positions.png`, print the result.

    `positions.png` shows the relative tables of the best checkpoint, if the model has relative tables.

    All processes call this function. `since` is the number of epochs that were trained before the training was resumed.
    With `same_run`, these epochs were trained in the same folder, so one of them may have the best checkpoint.
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
        "train/images": len(data.dataset("train")),
        # If the training was resumed after its last epoch, no validation has counted its images: count all of val.
        "val/images": model.evaluated_images or len(data.dataset("val")),
    }
    summary = with_errors(summary, summary["val/images"])
    lines = [f"Trained {counted(trained, 'epoch')} in {seconds / 60:.1f} min."]
    for stop in trainer.early_stopping_callbacks:
        if stop.stopped_epoch and stop.stopped_epoch + 1 == trainer.current_epoch:
            lines.append(f"Stopped early: patience {stop.patience} with {stop.monitor} has run out.")
            summary["stopped_early"] = True
    resumed = f" since resuming after epoch {since}" if since and not same_run else ""
    lines.append(
        f"Best validation {what}{resumed}: {plus_minus(summary, f'val/{score}')} (images: "
        f"{summary['val/images']}), epoch {checkpoints.best_epoch}"
        f"{baseline(class_counts(trainer, 'val'))}"
    )
    # Print these lines before the test, because a test image that cannot be read may end the command.
    rank_zero_print("\n".join(lines))
    lines = []
    if data.has_test:
        results = trainer.test(model, data, ckpt_path=best, verbose=False)[0]
        summary |= with_errors(results, model.evaluated_images) | {"test/images": model.evaluated_images}
        more = {"test/acc5": "top-5", "test/f1": "mean F1"}
        more = "".join(f", {text} {plus_minus(summary, name)}" for name, text in more.items() if name in summary)
        more += baseline(class_counts(trainer, "test"))
        shown = f"{plus_minus(summary, f'test/{score}')} (images: {summary['test/images']})"
        lines.append(f"Test {what} of that checkpoint: {shown}{more}")
    if model.transfer is not None:
        summary["pretrained"] = without_secrets(model.transfer.plain())
    if rank_zero_only.rank == 0:
        write_summary(folder, summary, trainer)
        _draw_positions(folder / "positions.png", best, data)
        send_results(trainer, folder, summary)
        suggestions = _suggestions(model.net, data, best, model.labels)
        rank_zero_print("\n".join([*lines, files_line(folder), "Next:", *suggestions]))


def _draw_positions(target: Path, best: str, data: LightningDataModule) -> None:
    try:
        image = torch.empty(len(data.mean), *data.img_size)
        save_figure(draw("tables", load_classifier(best).net, image), target)
    except NotApplicableError:
        pass
    # A finished training must not fail because of a figure, and drawing may raise any exception: the memory may be too
    # small, a font missing, or a user's position module wrong.
    except Exception as error:
        rank_zero_print(f"Note: {target.name} could not be drawn: {one_line(error)}")


def _suggestions(net: nn.Module, data: LightningDataModule, best: str, labels: Labels) -> list[str]:
    """Return commands that work as printed."""
    path = Path(best).relative_to(Path.cwd()) if Path(best).is_relative_to(Path.cwd()) else best
    path = shlex.quote(str(path))
    # Name the user's own data module in the commands: for safety, relvit never imports a module only because a
    # checkpoint names it.
    named = f" --data {class_path_of(type(data))}" if data.is_of_user() else ""
    lines = []
    if not data.shape.fixed:
        # Suggest larger images of the same shapes: 1.5 times as many tokens as in the training.
        lines.append(f"  relvit validate {path} --data.max_tokens {round(1.5 * data.shape.max_tokens)}{named}")
    elif getattr(net, "dynamic_img_size", False):
        # Suggest images whose sides are a quarter longer, in whole patches. In much larger images accuracy would fall.
        patch = net.patch_embed.patch_size
        trained = list(data.img_size)
        larger = [max(side + p, round(1.25 * side / p) * p) for side, p in zip(trained, patch, strict=True)]
        first, second = (shlex.quote(size_text(size)) for size in (trained, larger))
        lines.append(f"  relvit validate {path} --img_size {second}{named}")
        lines.append(f"  relvit resolutions {path} --sizes {first} {second}{named}")
    lines.append(f"  relvit predict {path} FOLDER_OF_IMAGES")
    return [*lines, f"Also of a checkpoint: relvit {labels.commands}; each has --help"]
