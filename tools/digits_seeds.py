"""Mean test accuracy of configs/digits.yaml over seeds: `python tools/digits_seeds.py [SEED ...]` (0 1 2)."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from relvit.cli import main

CONFIG = Path(__file__).parent.parent / "configs" / "digits.yaml"


def accuracy(seed: int) -> tuple[float, float]:
    """Test accuracy and minutes of one training."""
    with tempfile.TemporaryDirectory() as runs:
        arguments = ["fit", f"--config={CONFIG}", f"--seed_everything={seed}", f"--runs={runs}"]
        if main([*arguments, "--trainer.enable_progress_bar=false"]) != 0:
            sys.exit(1)
        summary = json.loads(next(Path(runs).glob("*/summary.json")).read_text())
    return summary["test/acc1"], summary["minutes"]


if __name__ == "__main__":
    seeds = [int(argument) for argument in sys.argv[1:]] or [0, 1, 2]
    results = [accuracy(seed) for seed in seeds]
    for seed, (value, minutes) in zip(seeds, results, strict=True):
        print(f"seed {seed}: test accuracy {value:.4f} in {minutes:.2f} min")
    print(f"mean of {len(seeds)} seeds: {statistics.mean(value for value, _ in results):.4f}")
