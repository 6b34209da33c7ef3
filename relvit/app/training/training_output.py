"""`TrainingOutput`: the logits of a model in training, with a distillation token's logits and further losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class TrainingOutput(NamedTuple):
    """The output of a model in training mode.

    A model with losses besides the loss of its logits lists the names of these losses in its attribute
    `training_losses`. After `set_training_losses(True)`, the model returns an object with the attributes `logits` and
    `losses` in training mode.

    Attributes:
        logits: (B, num_classes).
        distilled: (B, num_classes), the logits that learn from a teacher; the same as `logits` in a model without a
            distillation token.
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
