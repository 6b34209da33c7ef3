"""Computing in the precision of the tensors, whatever autocast would make of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Switch autocast off for a device; where it does not exist (the meta device), there is nothing to switch off."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
