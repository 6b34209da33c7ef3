"""What all tests share; `tests/support/data/trained_runs.py` has the data and runs of the application's tests."""

import gc
import os

import torch

# With `pytest -n` each process has a core for itself.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keep imported modules out of the garbage collector, which would otherwise visit them again and again."""
    gc.collect()
    gc.freeze()
