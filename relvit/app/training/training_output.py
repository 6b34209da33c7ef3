"""`TrainingOutput`: the logits of a model in training, with a distillation token's logits and further losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class TrainingOutput(NamedTuple):
    """The output of a model in training mode.

    A model that computes losses besides the loss of its logits lists their names in its attribute `training_losses`.
    After `set_training_losses(True)` the model returns any object with the attributes `logits` and `losses`.

    Attributes:
        logits: (B, num_classes).
        distilled: (B, num_classes), the logits that learn from a teacher.
        losses: the model's additional losses by name, scalars.
    """

    logits: Tensor
    distilled: Tensor
    losses: Mapping[str, Tensor]


def training_output(output: Any) -> TrainingOutput:
    """Convert the output of a model in training to a `TrainingOutput`.

    Args:
        output: logits, timm's pair of logits from a class token and a distillation token, or an object with `losses`.
    """
    if hasattr(output, "losses"):
        return TrainingOutput(output.logits, output.logits, output.losses)
    logits, distilled = output if isinstance(output, tuple) else (output, output)
    return TrainingOutput(logits, distilled, {})
