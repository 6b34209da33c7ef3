"""PyTorch's own default dtype and device, for code whose results must not depend on what the user has set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

Item = TypeVar("Item")


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Context or decorator in which PyTorch's defaults are float32 and the CPU, as after its import.

    Models that are read from files in this context, and tensors made from their outputs, do not depend on the user's
    calls of `torch.set_default_dtype`, `torch.set_default_device` or `with torch.device(...)`.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        # The context of a device intercepts every operation, which takes time, so use no such context if the default is
        # the CPU already.
        with nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def under_torch_defaults(items: Iterable[Item]) -> Iterator[Item]:
    """Iterate with `torch_defaults` active only while the next item is computed."""
    with torch_defaults():
        iterator = iter(items)
    end = object()
    while True:
        with torch_defaults():
            item = next(iterator, end)
        if item is end:
            return
        yield item
