"""Measure the memory that an action allocates on the CPU."""

import gc
import itertools
import os
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


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
