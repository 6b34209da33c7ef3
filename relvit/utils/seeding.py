"""Random numbers that are a function of where a training is, and of nothing before it.

So a training that goes on after an interruption draws what it would have drawn without.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


def run_seed() -> int:
    """The seed of the run, where Lightning's `seed_everything` leaves it; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def seed_all(*key: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices by `key` alone."""
    seed = _hash(key)
    _seed_host(seed)
    # The CPU's generator once more, and those of all accelerators.
    torch.manual_seed(seed)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Random numbers of Python, NumPy and PyTorch's CPU that depend on `key` alone.

    Outside they go on as if nothing had been drawn. In a loader's worker, where nobody else draws, they do not: putting
    three states back takes longer than loading a small image.
    """
    if get_worker_info() is not None:
        _seed_host(_hash(key))
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed_host(_hash(key))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed would seed the accelerators as well, which a worker must not touch.
    torch.default_generator.manual_seed(seed)


def _hash(key: tuple[int, ...]) -> int:
    """63 bits in which neighbouring keys have nothing in common."""
    digest = hashlib.blake2b(struct.pack(f"{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
