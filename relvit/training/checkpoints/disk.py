"""Whether a run's disk has room for what is to be written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from lightning import Trainer


class NoRoomError(OSError):
    """The disk is too small for what a training is going to write."""


def last_whole(folder: Path) -> str:
    """In words, the checkpoint of a folder that was written last; all that are there are whole."""
    whole = sorted(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    return f"the last whole checkpoint is {whole[-1]}" if whole else "there is no earlier checkpoint"


def checkpoint_size(trainer: Trainer) -> int:
    """About how many bytes a checkpoint of this training takes: weights, their average, and two numbers of the
    optimiser for each weight, as Adam and its kin keep them."""
    module = trainer.lightning_module
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    trained = sum(p.nbytes for group in trainer.optimizers[0].param_groups for p in group["params"])
    average = 0 if getattr(module, "average", None) is None else weights
    return weights + average + 2 * trained


def check_room(folder: Path, size: int) -> None:
    """Refuse a disk without room for two checkpoints, as one replaces another only when it is whole.

    Args:
        folder: where they are to be written; it need not exist yet. Those that are there already count.
        size: of one, in bytes.

    Raises:
        NoRoomError: there is less.
    """
    place = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    there = sum(1 for _ in folder.glob("*.ckpt")) if folder.is_dir() else 0
    needed, free = size * max(2 - there, 1), shutil.disk_usage(place).free
    if free < needed:
        raise NoRoomError(
            errno.ENOSPC,
            f"{_megabytes(free)} are free at {place}, a checkpoint of this training takes about {_megabytes(size)} and "
            f"{'one more has' if needed == size else 'two have'} to fit: make room, or give another folder (--runs)",
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
