"""Early stopping on the validation accuracy."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping


class Patience(EarlyStopping):
    """Stop a training after this number of validations in a row without a better accuracy.

    Lightning's own goes on from a checkpoint with the patience that is stored there, whatever it is given.

    Args:
        validations: the patience.
    """

    def __init__(self, validations: int) -> None:
        super().__init__("val/acc1", mode="max", patience=validations)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
