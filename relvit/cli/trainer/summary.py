"""Write `summary.json` of `relvit fit` and `test`; describe the files of a run, and the commonest class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Trainer

from relvit.data import ImageData
from relvit.data.modules.base import Split
from relvit.training import DataRecord

# The best checkpoint is chosen by one of these metrics, see `ImageClassifier.score`.
SCORES = {"acc1": "accuracy", "map": "mean average precision"}


def class_counts(data: ImageData, split: Split) -> np.ndarray | None:
    """Count the images of each class; None with several labels, or where a dataset does not list its labels."""
    labels = getattr(data.dataset(split), "targets", None)
    return None if labels is None or np.ndim(labels[0]) else np.bincount(labels)


def baseline(counts: np.ndarray | None) -> str:
    """Describe the accuracy of always naming the commonest class."""
    return "" if counts is None else f"; always the commonest class: {counts.max() / counts.sum():.4f}"


def write_summary(folder: Path, summary: dict[str, Any], trainer: Trainer) -> None:
    """Write the results of a run, with the number of images in each split that could not be read."""
    record = next(callback for callback in trainer.callbacks if isinstance(callback, DataRecord))
    if record.counts:
        summary["unreadable"] = record.counts
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def files_line(folder: Path) -> str:
    """List the files in the folder of a run in a line."""
    return f"Files: {folder} ({', '.join(sorted(path.name for path in folder.glob('[!.]*')))})"
