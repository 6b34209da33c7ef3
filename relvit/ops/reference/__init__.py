"""Slow references of all operations, straight from the papers' formulas, with the same signatures and no checks."""

from relvit.ops.reference.attention import attention_logits, attention_weights, relative_attention, relative_logits

__all__ = ["attention_logits", "attention_weights", "relative_attention", "relative_logits"]
