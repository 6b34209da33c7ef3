"""Count the processor cores that this process may use, and tell whether other processes want them, too."""

import os


def cores() -> int:
    """Return the number of cores that this process may use: a container or a job may be given fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_note() -> str | None:
    """Return a sentence where more processes want the cores than there are; None where there is a core for each."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores():
        return None
    return f"Note: {load:.1f} processes already want the {cores()} cores of this machine, which makes this one slower"
