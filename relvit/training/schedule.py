"""Learning rate per optimiser step."""

from __future__ import annotations

import math


def warmup_cosine(step: int, total: int, warmup: int, floor: float) -> float:
    """Factor on the learning rate at an optimiser step: a linear rise, then half a cosine down to `floor`.

    The first step already has 1 / (warmup + 1) of the full rate, step `warmup` has all of it, step `total - 1` is one
    step short of `floor`. As in DeiT (Touvron et al. 2021, arXiv 2012.12877, table 9), but per step, not per epoch.

    Args:
        step: 0 for the first optimiser step.
        total: number of steps of the training.
        warmup: steps of the rise, fewer than `total`.
        floor: last factor, in 0 ... 1.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
