"""`fuzzed` gives a test of `tests/app/fuzz` random generators, which hypothesis draws and names where the test fails.

FUZZ_EXAMPLES says how many; with it `--hypothesis-seed=N` draws others. Without it a test draws the same few each time.
"""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


def fuzzed(examples: int) -> Callable[[Callable], Callable]:
    """Call a test with its argument `chance`, a `random.Random`, as many times."""
    options = settings(
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", examples)),
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        # A smaller seed of a generator is no simpler example.
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    drawn = given(chance=st.randoms(use_true_random=True))
    return lambda test: options(drawn(test))
