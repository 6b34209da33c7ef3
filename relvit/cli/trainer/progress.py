"""Choose the progress display of a run: a bar on terminals, a line for each epoch elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning import Callback
from lightning.pytorch.callbacks import ProgressBar

from relvit.training import EpochLines, History, TrainingProgressBar


def progress_callbacks(config: dict[str, Any], history: History | None, quiet: bool) -> list[Callback]:
    """Return the callbacks that show the progress: a bar on terminals, a line for each epoch elsewhere, or nothing.

    Args:
        config: of the trainer; its `enable_progress_bar` and its progress bars are set as is necessary.
        history: that of a training; none: this is no training.
        quiet: show nothing.
    """
    if quiet:
        config["enable_progress_bar"] = False
        config["callbacks"] = [callback for callback in config["callbacks"] if not isinstance(callback, ProgressBar)]
        return []
    # A bar in a file is a heap of control characters, which users may ask for.
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    own_bar = any(isinstance(callback, ProgressBar) for callback in config["callbacks"])
    if config["enable_progress_bar"] is None:
        config["enable_progress_bar"] = own_bar or terminal
    if history is None:
        return []
    shown: list[Callback] = []
    if config["enable_progress_bar"] and not own_bar:
        shown.append(TrainingProgressBar())
    if not (config["enable_progress_bar"] and terminal):
        shown.append(EpochLines(history))
    return shown
