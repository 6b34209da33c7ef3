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
    """List the bytes of each allocation of an action on the CPU, in order; negative numbers are released bytes."""
    # Set log level 6 to hide the messages that the profiler prints when it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # A garbage collection during the action would release older objects, and the profiler would count their memory as
    # released by the action. So switch collections off. (Collecting all garbage before the action would take too long.)
    collects = gc.isenabled()
    gc.disable()
    try:
        # The profiler records each allocation. Saved-tensor hooks would miss tensors that closures and other hooks
        # keep, and dispatch modes would miss the allocations of compiled code.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            action()
    finally:
        if collects:
            gc.enable()
    events = (event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]")
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
