"""Find the device of a name such as cpu or auto; count the cores and the memory that a process can take."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from relvit.app.utils.shown_text import counted, cut
from relvit.utils.messages import did_you_mean

# Error messages suggest these kinds of devices, although PyTorch knows further kinds.
KINDS = ("cpu", "cuda", "mps", "xpu")


def cores(root: str | os.PathLike[str] = "/") -> int:
    """Return the number of cores that this process may use: a container or a job may be given fewer than there are.

    Args:
        root: The folder whose subfolders proc and sys are read; only tests need another one than '/'.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([count, *(math.ceil(quota) for quota in _of_groups(Path(root), CORES) if quota > 0)])


def busy_note() -> str | None:
    """Return a sentence if more processes want to run than there are cores; otherwise None."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores():
        return None
    place = f"the {counted(cores(), 'core')} of this machine"
    return f"Note: {load:.1f} processes already want {place}, which makes this one slower"


def available_memory(root: str | os.PathLike[str] = "/") -> int | None:
    """Return the bytes that this process can take without swapping; None where the system does not report them.

    On Linux the result is the kernel's MemAvailable, or less if a container or a cluster's job has a limit. On other
    systems the result is the memory of free pages, if the system reports them.

    Args:
        root: The folder whose subfolders proc and sys are read; only tests need another one than '/'.
    """
    root = Path(root)
    left = [*_of_machine(root), *_of_groups(root, MEMORY)]
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


def _memory_left(limit: str, taken: str, reclaimable: str, group: Path) -> int:
    """Return the bytes that a group leaves, by its files with the limit and with the memory in use.

    `reclaimable` is the entry of memory.stat that counts memory which the kernel can free when needed.
    """
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Without a limit, the file `limit` of version 1 holds a number above the memory of every machine, which does not
    # lower the result. In version 2 the file holds 'max', for which `int` raises ValueError.
    allowed, used = int((group / limit).read_text()), int((group / taken).read_text())
    return allowed - used + int(counts.get(reclaimable, 0))


def _quota(files: tuple[str, ...], group: Path) -> float:
    """Return the seconds of processor time that a group may use in a second; a negative number means no limit."""
    time, period = " ".join((group / name).read_text() for name in files).split()
    return int(time) / int(period)


# Each key is a controller's name in /proc/self/cgroup, which is '' in version 2 of control groups (cgroup).
Readers = Mapping[str, Callable[[Path], float]]
MEMORY: Readers = {
    "": partial(_memory_left, "memory.max", "memory.current", "inactive_file"),
    "memory": partial(_memory_left, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
CORES: Readers = {
    "": partial(_quota, ("cpu.max",)),
    "cpu": partial(_quota, ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}


def _of_groups(root: Path, readers: Readers) -> Iterator[float]:
    """Yield the limits of this process's control groups, and of the groups around them, that `readers` can read."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        for controller in readers.keys() & controllers.split(","):
            group = root / "sys/fs/cgroup" / controller / path.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):
                    yield readers[controller](folder)


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
