"""Random numbers that are a function of where a training is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Random numbers of the CPU that depend on `key` alone; outside they go on as if nothing had been drawn.

    So what is drawn at a step does not depend on what was drawn before it, and a resumed run draws the same.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the other devices as well, which are not put back.
        torch.default_generator.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        yield
