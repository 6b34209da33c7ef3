"""How much memory there is left to take."""

import os
from pathlib import Path

# Of the control groups of Linux, by the controller's name in /proc/self/cgroup ('' is version 2): the limit, what is
# taken, and what of that are files that give way.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: str | os.PathLike[str] = "/") -> int | None:
    """Bytes that this process can take without swapping, or None where the system does not say.

    On Linux what the kernel calls available, or less where a container or a cluster's job is given less; elsewhere the
    free pages, if the system counts them.

    Args:
        root: Where /proc and /sys are.
    """
    left = [amount for amount in (_of_machine(Path(root)), *_of_groups(Path(root))) if amount is not None]
    return max(0, min(left)) if left else None


def _of_machine(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _of_groups(root: Path) -> list[int]:
    """What the limits of this process's control groups, and of those around them, leave."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    left = []
    for _, controllers, place in entries:
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in _FILES:
            continue
        top = root / "sys/fs/cgroup" / controller
        group = top / place.lstrip("/")
        around = (folder for folder in (group, *group.parents) if folder.is_relative_to(top))
        left += [_of_group(folder, *_FILES[controller]) for folder in around]
    return [amount for amount in left if amount is not None]


def _of_group(folder: Path, limit: str, taken: str, files: str) -> int | None:
    try:
        # Without a limit the file says 'max', or a number that no machine reaches.
        allowed, used = int((folder / limit).read_text()), int((folder / taken).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return allowed - used + int(counts.get(files, 0))
