"""Early stopping on the validation accuracy (`--patience`)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping


class Patience(EarlyStopping):
    """Stops a training after this number of validations in a row without a better accuracy, or other `monitor`.

    A resumed training takes the patience that it is given: Lightning's callback would take that of the checkpoint.
    """

    def __init__(self, validations: int, monitor: str = "val/acc1") -> None:
        # After each validation: an epoch that is cut short by a number of steps has none.
        super().__init__(monitor, mode="max", patience=validations, check_on_train_epoch_end=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
