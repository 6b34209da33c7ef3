"""A progress bar for what takes long outside the Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def with_bar(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Hand items on while a bar on the standard error output counts them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, total, description=what)
