"""Accuracies of configs/digits.yaml over seeds and numbers of threads, which round differently:

python tools/digits_seeds.py                        # seeds 0, 1, 2, with as many threads as PyTorch takes
python tools/digits_seeds.py --seeds 3 4 --threads 1 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from relvit.cli import main

CONFIG = Path(__file__).parent.parent / "configs" / "digits.yaml"


def train(seed: int, threads: int) -> dict[str, Any]:
    """What a training's summary says."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as runs:
        arguments = ["fit", f"--config={CONFIG}", f"--seed_everything={seed}", f"--runs={runs}"]
        if main([*arguments, "--trainer.enable_progress_bar=false"]) != 0:
            sys.exit(1)
        return json.loads(next(Path(runs).glob("*/summary.json")).read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    options = parser.parse_args()
    lines, accuracies = [], []
    for seed, threads in itertools.product(options.seeds, options.threads):
        found = train(seed, threads)
        accuracies.append(found["test/acc1"])
        lines.append(
            f"seed {seed}, threads {threads}: validation accuracy {found['val/acc1']:.4f}, test accuracy "
            f"{found['test/acc1']:.4f} in {found['minutes']:.2f} min"
        )
    print("\n".join(lines))
    print(f"mean of {len(accuracies)} trainings: {statistics.mean(accuracies):.4f}, least {min(accuracies):.4f}")
