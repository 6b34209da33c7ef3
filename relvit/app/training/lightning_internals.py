"""Private attributes of Lightning (with a leading underscore): no other file of the package uses any.

A new minor version of Lightning may change them. `tests/app/training/test_lightning_internals.py` then fails first.
"""

from __future__ import annotations

from lightning import Trainer


def validation_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the training batch that was processed last.

    The answer depends on `val_check_interval` (batches, a part of the epoch, or time), `check_val_every_n_epoch`, data
    without a length, and early stops. Lightning has no public function for this.
    """
    # Lightning reads the argument only for training steps that fetch their batches themselves, which relvit's training
    # step does not.
    return trainer.fit_loop.epoch_loop._should_check_val_fx(None)
