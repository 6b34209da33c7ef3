"""Measure what other processes on the cores cost: `python tools/speed/busy.py`, on a machine that does nothing else.

Every case runs alone and beside as many endless loops as there are cores, each time with the waiting policy of OpenMP's
threads that PyTorch leaves, and with the policy that relvit's command line sets (`relvit_start.prepare_environment`).
The tool prints medians of rounds.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import relvit_start

WAITING = {"PyTorch's waiting": {}, "relvit's waiting": {"GOMP_SPINCOUNT": relvit_start.SPIN_COUNT}}
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Each case is measured in a new process, because the environment of a process says how its threads wait.
CASES = ("relvit_tiny step", "vit_tiny_patch16_224 step", "SAM block, tiled", "SAM block, timm", "digits epoch")
PATIENCE = 300


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep this number of cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of_epoch(environment: dict[str, str], epochs: int) -> float:
    """Train on the digits as a user does; return the median time of an epoch's training steps."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "relvit", "fit", "--config", "digits", "--epochs", str(epochs), "--runs", runs]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=PATIENCE)
        (table,) = Path(runs).glob("*/metrics.csv")
        with open(table) as file:
            rates = [float(row["system/images_per_second"]) for row in csv.DictReader(file)]
    # The digits have 1,257 training images; the first epoch warms up.
    return 1257 / statistics.median(rates[1:])


def seconds_of_step(case: str, steps: int) -> float:
    """Return the median time of a case in this process."""
    import timm
    import torch
    from timm.models.vision_transformer_sam import VisionTransformerSAM

    import relvit

    torch.manual_seed(0)
    if case.startswith("SAM"):
        # The patch embedding and the neck take little time beside this one global block of 64 x 64 patches.
        sizes = {"img_size": 1024, "embed_dim": 768, "depth": 1, "num_heads": 12, "window_size": 14}
        model = VisionTransformerSAM(**sizes, use_rel_pos=True, global_attn_indexes=(0,), num_classes=0).eval()
        if case.endswith("tiled"):
            relvit.retrofit(model)
        images = torch.randn(1, 3, 1024, 1024)

        def step() -> None:
            with torch.inference_mode():
                model(images)

    else:
        model = timm.create_model(case.partition(" ")[0], num_classes=10)
        optimizer = torch.optim.AdamW(model.parameters())
        images = torch.randn(2, 3, 224, 224)

        def step() -> None:
            optimizer.zero_grad()
            model(images).logsumexp(-1).sum().backward()
            optimizer.step()

    # The first step warms up and does not count.
    return statistics.median(timeit.repeat(step, number=1, repeat=steps + 1)[1:])


def measure(case: str, environment: dict[str, str], steps: int) -> float:
    """Return the seconds of a case in a process with these settings; infinity where it takes more than PATIENCE."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | environment
    try:
        if case == "digits epoch":
            return seconds_of_epoch(environment, steps)
        command = [sys.executable, __file__, "--case", case, "--steps", str(steps)]
        found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=PATIENCE)
        return float(found.stdout)
    except subprocess.TimeoutExpired:
        return math.inf


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each case in each round; epochs of the digits")
    parser.add_argument("--case", choices=CASES, help="measure one case in this process, and print its seconds")
    given = parser.parse_args(arguments)
    if given.case:
        print(seconds_of_step(given.case, given.steps))
        return
    cores = len(os.sched_getaffinity(0))
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for _, case, loaded, waiting in itertools.product(range(given.rounds), given.cases, (False, True), WAITING):
        with busy(cores if loaded else 0):
            found[case, waiting, loaded].append(measure(case, WAITING[waiting], given.steps))
    print(f"medians of {given.rounds} rounds, {cores} cores; busy: beside {cores} endless loops")
    print("| case | waiting | idle, ms | busy, ms | busy / idle |\n|---|---|---|---|---|")
    for case, waiting in itertools.product(given.cases, WAITING):
        idle, loaded = (statistics.median(found[case, waiting, state]) for state in (False, True))
        print(f"| {case} | {waiting} | {1e3 * idle:.0f} | {1e3 * loaded:.0f} | {loaded / idle:.1f} |")


if __name__ == "__main__":
    main()
