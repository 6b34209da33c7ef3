"""Find the device of a name such as cpu or auto; count the cores and the memory that a process can take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from relvit.app.utils.shown_text import cut
from relvit.utils.messages import did_you_mean

# Error messages suggest these kinds of devices, although PyTorch knows further kinds.
KINDS = ("cpu", "cuda", "mps", "xpu")


# Linux reports the memory of a control group (cgroup) in these files. Each key is the controller's name in
# /proc/self/cgroup, which is '' in cgroup version 2. The value names the file with the limit, the file with the memory
# in use, and the entry of memory.stat that counts memory which the kernel can free when needed.
CONTROL_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cores() -> int:
    """Return the number of cores that this process may use: a container or a job may be given fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_note() -> str | None:
    """Return a sentence if more processes want to run than there are cores; otherwise None."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores():
        return None
    return f"Note: {load:.1f} processes already want the {cores()} cores of this machine, which makes this one slower"


def available_memory(root: str | os.PathLike[str] = "/") -> int | None:
    """Return the bytes that this process can take without swapping; None where the system does not report them.

    On Linux the result is the kernel's MemAvailable, or less if a container or a cluster's job has a limit. On other
    systems the result is the memory of free pages, if the system reports them.

    Args:
        root: The folder whose subfolders proc and sys are read; only tests need another one than '/'.
    """
    root = Path(root)
    left = [*_of_machine(root), *_of_groups(root)]
    return max(0, min(left)) if left else None


def _of_machine(root: Path) -> Iterator[int]:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield 1024 * int(line.split()[1])
                return
    except OSError:
        pass
    with contextlib.suppress(AttributeError, ValueError, OSError):
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that the limits of this process's control groups, and of the groups around them, leave."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in CONTROL_GROUPS:
            continue
        limit, taken, reclaimable = CONTROL_GROUPS[controller]
        top = root / "sys/fs/cgroup" / controller
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Without a limit, the file `limit` of version 1 holds a number above the memory of every machine, which
                # does not lower the result. In version 2 the file holds 'max', for which `int` raises ValueError.
                allowed, used = int((folder / limit).read_text()), int((folder / taken).read_text())
                yield allowed - used + int(counts.get(reclaimable, 0))
            except (OSError, ValueError):
                continue


def find_device(name: str) -> torch.device:
    """Return the device with this name; 'auto' is an accelerator if there is one, otherwise the CPU.

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
    # Which of these errors PyTorch raises depends on the device, and on the devices for which PyTorch was built, so
    # catch all of them.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = cut(str(error).strip().splitlines()[0], 200)
        raise ValueError(f"cannot compute on device {name!r}: {reason}") from error
    return device
