"""Measure the memory that a process can still take, within the limits of containers, and what an action allocates."""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

# Linux control groups, by the controller's name in /proc/self/cgroup ('' is version 2): the files of the limit and of
# the memory in use, and the entry of memory.stat for memory that the kernel frees on demand.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: str | os.PathLike[str] = "/") -> int | None:
    """Return the bytes that this process can take without swapping; None where the system does not report them.

    On Linux the result is the kernel's MemAvailable, or less if a container or a cluster's job has a limit. On other
    systems it is the memory of free pages, if the system reports them.

    Args:
        root: Where /proc and /sys are.
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
        if controller not in _FILES:
            continue
        limit, taken, reclaimable = _FILES[controller]
        top = root / "sys/fs/cgroup" / controller
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Without a limit the file says 'max', or a number that no machine reaches.
                allowed, used = int((folder / limit).read_text()), int((folder / taken).read_text())
                yield allowed - used + int(counts.get(reclaimable, 0))
            except (OSError, ValueError):
                continue


def peak_bytes(action: Callable[[], Any]) -> int:
    """Count the most bytes that an action on the CPU has allocated at a time."""
    return max(itertools.accumulate(allocations(action), initial=0))


def allocations(action: Callable[[], Any]) -> list[int]:
    """List bytes allocated on the CPU by an action, and, as negative numbers, released, one after the other."""
    # Only the allocator knows all memory: saved-tensor hooks miss what other hooks and closures keep, and compiled code
    # bypasses dispatch modes. This log level hides the messages of the profiler's start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # A garbage collection within the action would count memory of earlier objects as released by the action. Collecting
    # before the action would take too long.
    collects = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            action()
    finally:
        if collects:
            gc.enable()
    events = (event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]")
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
