"""Explain why a run ended early: a signal, a lost process, a full disk; with how to go on, and the exit status."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning import Trainer

from relvit.cli.trainer.folder import explain_full_disk
from relvit.cli.trainer.launch import explain_lost_process
from relvit.training import StoppedBySignalError, ignore_stop_signals
from relvit.utils.progress import rank_zero_print


@contextmanager
def explained_failures(command: str, trainer: Trainer, folder: Path | None) -> Iterator[None]:
    """Say why a run could not end as it should, and how to go on where its folder has a checkpoint.

    Args:
        command: 'fit', 'validate', 'test' or 'predict'.
        trainer: which runs.
        folder: of its results; None: it writes none.
    """

    def can_resume() -> bool:
        return folder is not None and (folder / "checkpoints" / "last.ckpt").is_file()

    try:
        yield
    except SystemExit as stop:
        # A signal, or Lightning has caught Ctrl-C and is on its way out.
        if trainer.interrupted and can_resume():
            why = f"Stopped by {stop.signal.name}" if isinstance(stop, StoppedBySignalError) else "Stopped"
            rank_zero_print(f"{why}. To go on: relvit fit --resume {folder}")
        if isinstance(stop, StoppedBySignalError):
            ignore_stop_signals()
        elif trainer.interrupted:
            raise SystemExit(128 + signal.SIGINT) from stop
        raise
    except RuntimeError as error:
        hint = f"; to go on: relvit fit --resume {folder}" if can_resume() else ""
        raise explain_lost_process(error, trainer, hint) from error
    except OSError as error:
        raise explain_full_disk(error, command, folder) from error
