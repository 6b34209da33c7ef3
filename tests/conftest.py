"""Options of all tests; `tests/support/data/trained_runs.py` has the data and runs of the application's tests."""

import gc
import os
from collections import Counter

import pytest
import torch

# With `pytest -n` there is a process per core, so each process computes with one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # By default Inductor starts processes for compiling, each of which imports PyTorch first.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Otherwise Inductor first compiles a program for each set of vector instructions, to learn whether it can use them.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Let `--dist loadfile` distribute files in their collected order instead of by their numbers of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n`, put files with many slow tests first, so that none of them runs alone at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests = Counter(item.path for item in items)
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        # A slow test takes about thirty times as long as another test.
        items.sort(key=lambda item: (-tests[item.path] - 30 * slow[item.path], item.path))


def pytest_collection_finish() -> None:
    """Freeze imported modules, so that the garbage collector does not visit them again and again."""
    gc.collect()
    gc.freeze()
