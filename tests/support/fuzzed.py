"""`fuzzed` runs a test with random generators that hypothesis draws, and names the generator for which the test fails.

FUZZ_EXAMPLES sets the number of examples. Each run then draws other examples, by the seed in `--hypothesis-seed=N` if
it is given. Without FUZZ_EXAMPLES a test draws the same few examples each time.
"""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


def fuzzed(examples: int) -> Callable[[Callable], Callable]:
    """Call a test this number of times, with a `random.Random` as its argument `chance`."""
    options = settings(
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", examples)),
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        # A smaller seed does not give a simpler example, so do not shrink examples.
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    drawn = given(chance=st.randoms(use_true_random=True))
    return lambda test: options(drawn(test))
