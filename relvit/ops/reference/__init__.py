"""Slow references of all operations, straight from the papers' formulas, with the same signatures and no checks."""

from typing import TYPE_CHECKING

from relvit._moved import moved
from relvit.ops.reference.attention import attention_logits, attention_weights, relative_attention, relative_logits

__all__ = ["attention_logits", "attention_weights", "relative_attention", "relative_logits"]

if not TYPE_CHECKING:
    __getattr__ = moved("relvit.ops.reference")
