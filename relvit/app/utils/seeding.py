"""Seed random numbers by seed, epoch and position alone, so that a resumed training repeats them exactly."""

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
    """Return the seed of the run, which Lightning's `seed_everything` keeps; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def seed_all(*key: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices by `key` alone."""
    seed = _hash(key)
    _seed_host(seed)
    # `torch.manual_seed` seeds the generators of the CPU and of all accelerators.
    torch.manual_seed(seed)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Context in which the generators of Python, NumPy and PyTorch's CPU are seeded by `key`.

    Afterwards the three generators get their earlier states back, except in a DataLoader worker: nothing else draws
    random numbers there, and restoring the states takes longer than loading a small image.
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
    # `torch.manual_seed` would also seed the accelerators, which a DataLoader worker must not use.
    torch.default_generator.manual_seed(seed)


def _hash(key: tuple[int, ...]) -> int:
    """Compute a hash of 63 bits, so that neighbouring keys give unrelated random numbers."""
    digest = hashlib.blake2b(struct.pack(f"{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
