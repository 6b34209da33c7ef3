"""Slow and readable: every operation as its paper has it, with the same signature and no validation."""

from relvit.ops.reference.aft import aft_conv, aft_full, aft_local, aft_simple
from relvit.ops.reference.attention import attention_weights, relative_attention, relative_logits

__all__ = [
    "aft_conv",
    "aft_full",
    "aft_local",
    "aft_simple",
    "attention_weights",
    "relative_attention",
    "relative_logits",
]
