"""Seconds that `import relvit` takes beyond `import timm`: `python tools/import_time.py [ROUNDS]` (11), interleaved."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def seconds(module: str) -> float:
    """Wall time of a fresh interpreter that imports one module."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    samples = [(seconds("timm"), seconds("relvit")) for _ in range(rounds)]
    timm, relvit = (statistics.median(column) for column in zip(*samples, strict=True))
    difference = statistics.median(ours - theirs for theirs, ours in samples)
    print(
        f"import timm {timm:.2f} s, import relvit {relvit:.2f} s, "
        f"median difference {difference:+.2f} s ({rounds} rounds)"
    )
