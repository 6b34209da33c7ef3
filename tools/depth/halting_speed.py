"""Measure how much faster inference is when half of the patches halt at half depth.

    python tools/depth/halting_speed.py

Both runs halt the same patches at the same steps and give the same numbers: in one they leave the batch, in the other
they compute on and are masked. The probabilities are forced: every second patch halts after half of the steps. Runs
take turns; the median of their times counts. On the CPU one thread computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn

import relvit  # noqa: F401 (registers the models)


class ForcedHalting(nn.Module):
    """Halting probabilities that are given: every second patch halts at a step, all others at the end."""

    def __init__(self, halting: nn.Module, step: int) -> None:
        super().__init__()
        self.advance = halting.advance
        self.step = step
        self.calls = 0

    def forward(self, patches: Tensor) -> Tensor:
        """Count the steps, and return the probabilities (B, P) of this one."""
        self.calls += 1
        probability = torch.zeros(patches.shape[:2], device=patches.device)
        if self.calls == self.step:
            probability[:, ::2] = 1.0
        return probability


def seconds(model: nn.Module, images: Tensor, gather: bool) -> tuple[float, Tensor]:
    """Time one batch; also return its logits."""
    model.gather, model.halting.calls = gather, 0
    # On the CPU the time of the processor, in which other work on the machine does not count.
    clock = time.perf_counter if images.is_cuda else time.thread_time
    if images.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    logits = model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return clock() - start, logits


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=["relvit_universal_small", "relvit_universal_base"])
    add("--batch", type=int, default=8)
    add("--size", type=int, default=224)
    add("--rounds", type=int, default=7)
    add("--device", default="cpu")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| model | all compute, s | half leave, s | speed-up | largest difference of logits |\n|---|---|---|---|---|")
    for name in given.models:
        torch.manual_seed(0)
        model = timm.create_model(name, halting="act", img_size=given.size).eval().to(given.device)
        model.halting = ForcedHalting(model.halting, model.steps // 2)
        images = torch.randn(given.batch, 3, given.size, given.size, device=given.device)
        times, logits = {True: [], False: []}, {}
        for turn in range(given.rounds + 1):
            for gather in times:
                taken, logits[gather] = seconds(model, images, gather)
                if turn:  # the first one warms up
                    times[gather].append(taken)
        masked, gathered = (statistics.median(times[gather]) for gather in (False, True))
        difference = (logits[True] - logits[False]).abs().max()
        print(f"| `{name}` | {masked:.3f} | {gathered:.3f} | {masked / gathered:.2f} | {difference:.0e} |", flush=True)


if __name__ == "__main__":
    main()
