"""`relvit average`: the mean of several checkpoints."""

from __future__ import annotations

import shlex

from relvit.app.training import average_checkpoints


def average(ckpt_paths: list[str], *, output: str) -> None:
    """Write the mean of several checkpoints' weights as one checkpoint.

    All must have the same model, classes and transforms: epochs of one training, or trainings from one start.

    Args:
        ckpt_paths: The checkpoints, such as '[a.ckpt,b.ckpt]'; of each its moving average is used where it has one.
        output: The file to write: a new one whose name ends in .ckpt.
    """
    average_checkpoints(ckpt_paths, output)
    print(f"{output} holds the mean of {len(ckpt_paths)} checkpoints. Next:", flush=True)
    print(f"  relvit validate {shlex.quote(output)}", flush=True)
