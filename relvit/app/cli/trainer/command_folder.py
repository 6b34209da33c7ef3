"""The run folder of a command: make it, clean up, write `summary.json`, explain an early end; the chance level."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.app.cli.errors import UsageError
from relvit.app.data.images.file_datasets import LabelledFiles
from relvit.app.data.modules.base import Split
from relvit.app.training import DataRecord, StoppedBySignalError, ignore_stop_signals, new_run_folder, remove_if_empty
from relvit.app.training.checkpoints.file import DiskSpaceError, describe_last
from relvit.app.training.run.processes import explain_lost_process
from relvit.app.training.run.run_folder import missing_folders
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.files import DISK_ERRORS, is_address, parse_json, write_json
from relvit.app.utils.progress import rank_zero_print

# `ImageClassifier.score` is one of these metrics, by which the best checkpoint is chosen.
SCORES = {"acc1": "accuracy", "map": "mean average precision"}


@contextmanager
def new_folder(runs: str, name: str) -> Iterator[Path]:
    """Make a new folder for a run in the main process; remove the folder at the end if it is still empty.

    All other processes get `runs` and need no folder, because the main process sends them the paths of checkpoints.

    Raises:
        UsageError: the folder cannot be made.
    """
    if rank_zero_only.rank != 0:
        yield Path(runs)
        return
    # A configuration may say `runs: ~/runs`, in which no shell has replaced `~`.
    runs = os.path.expanduser(runs)
    parents = missing_folders(Path(runs))
    try:
        folder = new_run_folder(runs, name)
    except OSError as error:
        reason = f"cannot make a run's folder in {runs}: {error.strerror}"
        raise UsageError(f"{reason}; give another with --runs") from error
    try:
        yield folder
    finally:
        remove_if_empty(folder, parents)


def check_runs(runs: str | None, root: str | None) -> None:
    """Refuse a remote address in `runs`, and Lightning's `default_root_dir` (`root`), which `runs` replaces."""
    if root is not None:
        raise UsageError(
            f"--trainer.default_root_dir {root}: relvit writes runs into another folder: give --runs DIR instead"
        )
    if runs is not None and is_address(runs):
        raise UsageError(f"--runs {runs} is a remote address: give a folder of this machine")


def explain_full_disk(error: OSError, command: str, folder: Path | None) -> OSError:
    """Return the same error; for a full disk, add which files of the run exist and what to do."""
    if error.errno not in DISK_ERRORS or isinstance(error, DiskSpaceError) or folder is None:
        return error
    found = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    cure = DISK_ERRORS[error.errno]
    if command != "fit":
        # Another folder of runs helps only if the disk of the runs is full, and not if the full disk holds the user's
        # own data. An error that names no file may be about either disk, so its advice says "if".
        if error.filename is None:
            cure += f", or if {folder} is on that disk, give another folder (--runs)"
        elif Path(os.fsdecode(error.filename)).absolute().is_relative_to(folder.absolute()):
            cure += f", or give another folder than {folder} (--runs)"
        return OSError(error.errno, f"{found}: {cure}")
    parts = [found]
    kept = describe_last(folder / "checkpoints")
    if kept not in found:
        parts.append(kept)
    if (folder / "checkpoints" / "last.ckpt").is_file():
        parts.append(f"{cure}, then relvit fit --resume {folder}")
    return OSError(error.errno, "; ".join(parts))


@contextmanager
def explained_failures(command: str, trainer: Trainer, folder: Path | None) -> Iterator[None]:
    """Say why a run of `fit`, `validate`, `test` or `predict` ended early, and how to go on from its checkpoint."""

    def can_resume() -> bool:
        return folder is not None and (folder / "checkpoints" / "last.ckpt").is_file()

    try:
        yield
    except SystemExit as stop:
        # After a signal in a training, relvit raises `StoppedBySignalError`; after SIGTERM in an evaluation, Lightning
        # raises `SIGTERMException`; after Ctrl-C, Lightning exits. All three are a SystemExit, so tell them apart by
        # their class and the attribute `signal`.
        number = signal.SIGTERM if isinstance(stop, SIGTERMException) else getattr(stop, "signal", signal.SIGINT)
        if trainer.interrupted and can_resume():
            why = "Stopped" if number == signal.SIGINT else f"Stopped by {number.name}"
            rank_zero_print(f"{why}. To go on: relvit fit --resume {folder}")
        if isinstance(stop, StoppedBySignalError):
            ignore_stop_signals()
        elif trainer.interrupted:
            raise SystemExit(128 + number) from stop
        raise
    except RuntimeError as error:
        hint = f"; to go on: relvit fit --resume {folder}" if can_resume() else ""
        raise explain_lost_process(error, trainer, hint) from error
    except OSError as error:
        raise explain_full_disk(error, command, folder) from error


def class_counts(trainer: Trainer, split: Split) -> np.ndarray | None:
    """Count the readable images of each class in the split that was evaluated last.

    Return None if no image is readable, if the labels are not known, or if images have several labels. Also return None
    if the evaluation had a limit (`--trainer.limit_val_batches`): the counts would include images that it left out.
    """
    # Do not ask for `targets` of several labels, because they take a byte of memory for each class and image.
    if trainer.lightning_module.labels.thresholds is not None:
        return None
    dataset = trainer.datamodule.dataset(split)
    labels = attribute_of(dataset, "targets")
    if labels is None or np.ndim(labels[0]):
        return None
    unreadable = _record(trainer).unreadable.get(split, {})
    if unreadable and isinstance(dataset, LabelledFiles):
        pairs = zip(dataset.samples, labels, strict=True)
        labels = [label for (source, _), label in pairs if str(source) not in unreadable]
    # If a training was resumed after its last epoch, no validation has counted its images.
    evaluated = trainer.lightning_module.evaluated_images or len(labels)
    return np.bincount(labels) if 0 < len(labels) == evaluated else None


def baseline(counts: np.ndarray | None) -> str:
    """Describe the accuracy of a classifier that always predicts the most frequent class."""
    return "" if counts is None else f"; always the commonest class: {counts.max() / counts.sum():.4f}"


def settings(trainer: Trainer) -> dict[str, Any]:
    """Return the size or shape of the images of an evaluation, and whether mirror images count, for `summary.json`."""
    data = trainer.datamodule
    return {"img_size": list(data.img_size), "mirror": trainer.lightning_module.mirror} | data.shape.record()


def write_summary(folder: Path, summary: dict[str, Any], trainer: Trainer) -> None:
    """Write the results of a run, with the number of images in each split that could not be read."""
    if counts := _record(trainer).counts:
        summary["unreadable"] = counts
    write_json(folder / "summary.json", summary)


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the results of a run; return an empty dictionary if there are none, or if the file is damaged."""
    try:
        found = parse_json((folder / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _record(trainer: Trainer) -> DataRecord:
    """Return the callback that knows the unreadable images of all processes."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, DataRecord))


def files_line(folder: Path) -> str:
    """List the files in the folder of a run in a line."""
    return f"Files: {folder} ({', '.join(sorted(path.name for path in folder.glob('[!.]*')))})"
