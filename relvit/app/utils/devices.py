"""Find the device of a name such as cpu or auto; count processor cores, and note that other processes want them."""

from __future__ import annotations

import os

import torch

from relvit.utils.messages import cut, did_you_mean

# The kinds of devices that users have; PyTorch knows more names.
KINDS = ("cpu", "cuda", "mps", "xpu")


def cores() -> int:
    """Return the number of cores that this process may use: a container or a job may be given fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_note() -> str | None:
    """Return a sentence where more processes want the cores than there are; None where there is a core for each."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores():
        return None
    return f"Note: {load:.1f} processes already want the {cores()} cores of this machine, which makes this one slower"


def find_device(name: str) -> torch.device:
    """Return the device of that name; 'auto' is an accelerator if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        hint = did_you_mean(name.rstrip(":0123456789"), KINDS)
        kinds = f"{', '.join(KINDS)}, one of them with a number, as cuda:1"
        raise ValueError(f"device is {name!r}, which PyTorch does not know{hint}; allowed are auto, {kinds}") from error
    try:
        torch.empty(0, device=device)
    # The type of PyTorch's error depends on the device, and on what PyTorch was built for.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = cut(str(error).strip().splitlines()[0], 200)
        raise ValueError(f"cannot compute on device {name!r}: {reason}") from error
    return device
