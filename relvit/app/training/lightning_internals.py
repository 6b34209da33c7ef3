"""Private attributes of Lightning (with a leading underscore): no other file of the package uses any.

A new minor version of Lightning may change them. `tests/app/training/test_lightning_internals.py` then fails first. An
exception is `_start_method` of strategies, which `run/processes.py` reads only if it exists.
"""

from __future__ import annotations

from typing import Any

from lightning import Trainer


def validation_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the training batch that was processed last.

    Lightning has no public function for this. The answer depends on `val_check_interval` (batches, a part of the epoch,
    or time), on `check_val_every_n_epoch`, on whether the data have a length, and on early stops.
    """
    # The argument is the data fetcher, which Lightning reads only if a training step fetches its batches itself, as
    # relvit's does not. So pass None.
    return trainer.fit_loop.epoch_loop._should_check_val_fx(None)


def restore_loaders(trainer: Trainer, states: list[Any]) -> None:
    """Load the states of a checkpoint into the training loaders that have a `state_dict`, and iterate over them anew.

    Lightning itself loads the states only into loaders that are set up when its loops begin, but a schedule needs the
    number of batches, and so the loaders, before.
    """
    loop = trainer.fit_loop
    loop._combined_loader._load_state_dicts(states)
    iter(loop._data_fetcher)


def validates_by_clock(trainer: Trainer) -> bool:
    """Return whether `val_check_interval` is a time and not a number of batches or a part of an epoch."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def syncs_batch_norm(trainer: Trainer) -> bool:
    """Return whether Lightning will replace the batch norms of the model by PyTorch's `SyncBatchNorm`."""
    return getattr(trainer.strategy, "_layer_sync", None) is not None
