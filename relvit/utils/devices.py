"""Find the device of a name such as cpu, cuda:1 or auto, and refuse a device that this machine does not have."""

from __future__ import annotations

import torch


def find_device(name: str) -> torch.device:
    """Return the device of that name; 'auto' is an accelerator if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # Which one PyTorch raises depends on the device, and on what it was built for.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot compute on device {name!r}: {reason}") from error
    return device
