"""`relvit average`: the mean of several checkpoints."""

from __future__ import annotations

import shlex

from relvit.app.training import average_checkpoints


def average(ckpt_paths: list[str], *, output: str) -> None:
    """Write the mean of several checkpoints' weights as one checkpoint.

    All checkpoints must have the same model, classes and transforms. They should come from one training, or from
    trainings that started from the same weights.

    Args:
        ckpt_paths: The checkpoints, such as '[a.ckpt,b.ckpt]'. If a checkpoint has averaged weights (ema_decay), they
            are used.
        output: The file to write: a new one whose name ends in .ckpt.
    """
    average_checkpoints(ckpt_paths, output)
    print(f"{output} holds the mean of {len(ckpt_paths)} checkpoints. Next:", flush=True)
    print(f"  relvit validate {shlex.quote(output)}", flush=True)
