"""Early stopping on the validation accuracy, or on another metric (`--patience`)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping


class Patience(EarlyStopping):
    """Stop a training after this number of validations in a row without a better value of `monitor`.

    A resumed training uses the patience that the user gives when resuming. Lightning's own callback would restore the
    patience in the checkpoint instead.
    """

    def __init__(self, validations: int, monitor: str = "val/acc1") -> None:
        # Check only after validations: if a limit of steps ends an epoch early, the end of the epoch brings neither a
        # validation nor a new value of `monitor`.
        super().__init__(monitor, mode="max", patience=validations, check_on_train_epoch_end=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
