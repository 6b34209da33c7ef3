"""Examples drawn by a seeded generator, for the tests in `tests/app/fuzz`.

FUZZ_EXAMPLES says how many examples a test draws, FUZZ_SEED the seed. Example `n` of a seed is the same, however many
there are.
"""

import os
import random

import pytest

SEED = int(os.environ.get("FUZZ_SEED", "31"))


def examples(default):
    """Yield the number of each example, and its own generator of random numbers."""
    # FUZZ_FIRST begins with a later one, to see one example alone.
    first = int(os.environ.get("FUZZ_FIRST", "0"))
    for number in range(first, first + int(os.environ.get("FUZZ_EXAMPLES", default))):
        yield number, random.Random(f"{SEED}/{number}")


class Tally:
    """Counts examples by their outcome, and collects those that fail, so that one run shows them all."""

    def __init__(self, name):
        self.name, self.counts, self.failures = name, {}, []

    def count(self, outcome):
        self.counts[outcome] = self.counts.get(outcome, 0) + 1

    def fail(self, number, drawn, reason):
        self.count("failed")
        self.failures.append(f"seed {SEED}, example {number}, {drawn}: {reason}")

    def finish(self):
        """Print seed and counts, and fail the test if an example failed."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
        print(f"\n{self.name}: seed {SEED}, {sum(self.counts.values())} examples: {counts}")
        if self.failures:
            pytest.fail(f"{len(self.failures)} examples failed\n" + "\n".join(self.failures[:40]), pytrace=False)
