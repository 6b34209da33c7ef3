"""`relvit average`: the mean of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import auto_cli

from relvit.cli.parser import Parser
from relvit.training import average_checkpoints


def main(command: str, arguments: Sequence[str]) -> None:
    """Run with command line arguments."""
    auto_cli(average, args=list(arguments), prog=f"relvit {command}", as_positional=False, parser_class=Parser)


def average(ckpt_paths: list[str], output: str) -> None:
    """Write a checkpoint whose weights are the mean of several checkpoints' weights.

    They are of the same model, classes and transforms: epochs of one training, or trainings with a start in common.

    Args:
        ckpt_paths: The checkpoints, such as '[a.ckpt,b.ckpt,c.ckpt]'; of each its moving average where it has one.
        output: What to write: a new file that ends in .ckpt.
    """
    average_checkpoints(ckpt_paths, output)
    print(f"{output} holds the mean of {len(ckpt_paths)} checkpoints. Next:", flush=True)
    print(f"  relvit validate --ckpt_path {output}", flush=True)
