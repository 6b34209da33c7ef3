"""`eagerly`: run compiled models without their compiled code, in one thread at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_STANCE = RLock()


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models eagerly in this context, which other threads cannot enter meanwhile.

    PyTorch has one stance for all threads. If two threads changed the stance at once, the thread that ends last would
    restore what the other thread had set, and the process would never run compiled code again.
    """
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield
