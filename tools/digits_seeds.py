"""Train `--config digits` with several seeds and numbers of threads, which round differently; print the accuracies.

python tools/digits_seeds.py                        # seeds 0, 1, 2, with as many threads as PyTorch takes
python tools/digits_seeds.py --seeds 3 4 --threads 1 2
python tools/digits_seeds.py --model.model_kwargs.reversible true    # further options are those of `relvit fit`
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from relvit.app.cli import main
from relvit.app.cli.shipped_configs import shipped_configs

CONFIG = shipped_configs()["digits"]


def train(seed: int, threads: int, further: Sequence[str] = ()) -> dict[str, Any]:
    """Train once and return the run's summary."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as runs:
        arguments = ["fit", f"--config={CONFIG}", f"--seed_everything={seed}", f"--runs={runs}", *further]
        if main([*arguments, "--trainer.enable_progress_bar=false"]) != 0:
            sys.exit(1)
        return json.loads(next(Path(runs).glob("*/summary.json")).read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    options, further = parser.parse_known_args()
    found = {case: train(*case, further) for case in itertools.product(options.seeds, options.threads)}
    for (seed, threads), summary in found.items():
        accuracies = f"validation accuracy {summary['val/acc1']:.4f}, test accuracy {summary['test/acc1']:.4f}"
        print(f"seed {seed}, threads {threads}: {accuracies} in {summary['minutes']:.2f} min")
    tested = [summary["test/acc1"] for summary in found.values()]
    error = statistics.stdev(tested) / len(tested) ** 0.5 if len(tested) > 1 else 0.0
    print(f"mean of {len(tested)} trainings: {statistics.mean(tested):.4f} ± {error:.4f}, least {min(tested):.4f}")
