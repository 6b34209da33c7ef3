"""Report progress on the terminal: a progress bar outside the Trainer, and lines printed above the Trainer's bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tqdm import tqdm

from relvit.app.utils.shown_text import visible_lines, without_secrets


def with_bar(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Yield the items while a progress bar on standard error counts them."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, total, description=without_secrets(what))


@rank_zero_only
def rank_zero_print(text: str) -> None:
    """Print on the main process, at once, above a progress bar if there is one, without control characters.

    `LightningModule.print` would leave the printing to Lightning's progress bar, but `TQDMProgressBar` drops all texts
    that come before the bar's start.
    """
    tqdm.write(visible_lines(text))
    sys.stdout.flush()
