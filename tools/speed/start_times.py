"""Print how long the command line takes to start, beside the libraries that it loads.

    python tools/speed/start_times.py --rounds 7

Each round runs every command once, so that a busy machine slows all of them alike. The first round does not count,
because Python compiles changed files then. Seconds are medians; CPU seconds (user and system) depend less on other
processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

RELVIT = "import sys; from relvit_start import main; sys.exit(main())"


class Start(NamedTuple):
    """A command: its name, the program and arguments of Python, the command to compare with, and a time limit."""

    name: str
    program: list[str]
    beyond: str | None = None
    allowed: float | None = None


STARTS = (
    Start("import timm", ["import timm"]),
    Start("import timm, lightning", ["import timm, lightning"]),
    Start("import relvit", ["import relvit"], "import timm", 0.5),
    Start("relvit --help", [RELVIT, "--help"], None, 0.5),
    Start("relvit --version", [RELVIT, "--version"], None, 0.5),
    Start("relvit fit --help", [RELVIT, "fit", "--help"], "import timm, lightning", 2),
    Start("relvit fit --lrr 3", [RELVIT, "fit", "--lrr", "3"], "import timm, lightning", 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how long the command line takes to start.")
    parser.add_argument("--rounds", type=int, default=7, help="how often each command is run")
    rounds = parser.parse_args().rounds
    measured: dict[str, list[tuple[float, float]]] = {start.name: [] for start in STARTS}
    for _ in range(rounds + 1):
        for start in STARTS:
            measured[start.name].append(seconds(start.program))
    medians = {name: [statistics.median(each) for each in zip(*of[1:], strict=True)] for name, of in measured.items()}
    print("| command | seconds | CPU seconds | beyond | seconds | CPU seconds | allowed |", "|---" * 7 + "|", sep="\n")
    for start in STARTS:
        own = medians[start.name]
        base = medians[start.beyond] if start.beyond else (0.0, 0.0)
        more = [f"{value - under:.2f}" for value, under in zip(own, base, strict=True)]
        compared = [start.beyond or "", *more, f"{start.allowed:g}"] if start.allowed is not None else [""] * 4
        cells = [start.name, *(f"{value:.2f}" for value in own), *compared]
        print(f"| {' | '.join(cells)} |")


def seconds(program: list[str]) -> tuple[float, float]:
    """Run Python with a program, and measure its wall time and its CPU time."""
    # Without compiled files, every start would compile all modules again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-c", *program], env=environment, capture_output=True, check=False)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
