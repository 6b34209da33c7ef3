"""Available memory, computed from made-up files of /proc and /sys."""

import pytest

from relvit.app.utils.devices import available_memory

GIB = 2**30
MACHINE = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable:   {20 * 2**20} kB\n"}


def groups(entries):
    return {"proc/self/cgroup": entries}


def version_2(folder, limit, taken, files):
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{taken}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 1\ninactive_file {files}\n",
    }


def version_1(folder, limit, taken, files):
    return {
        f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{taken}\n",
        f"sys/fs/cgroup/memory/{folder}memory.stat": f"inactive_file 7\ntotal_inactive_file {files}\n",
    }


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 20),
        # In the job of a cluster 8 - 5 + 1 GiB are available.
        (groups("0::/a/b\n") | version_2("a/b/", 8 * GIB, 5 * GIB, GIB), 4),
        # The parent group leaves less memory than the process's own group, which has no limit.
        (groups("0::/a/b\n") | version_2("a/b/", "max", 5 * GIB, GIB) | version_2("a/", 7 * GIB, 6 * GIB, 0), 1),
        # In a container the own group is the root of /sys/fs/cgroup, but /proc has the group's path on the machine.
        (groups("0::/elsewhere\n") | version_2("", 8 * GIB, 5 * GIB, 0), 3),
        (groups("5:cpu,cpuacct:/x\n4:memory:/c\n0::/\n") | version_1("c/", 3 * GIB, GIB, GIB), 3),
        # Version 1 without a limit, and version 2 above its limit.
        (groups("4:memory:/\n") | version_1("", 2**63 - 4096, GIB, GIB), 20),
        (groups("0::/\n") | version_2("", GIB, 2 * GIB, 0), 0),
    ],
)
def test_the_least_of_machine_and_groups(tmp_path, files, gib):
    for name, text in (MACHINE | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == gib * GIB


def test_a_system_without_proc(tmp_path, monkeypatch):
    pages = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert available_memory(tmp_path) == 4_096_000
    # /proc/meminfo has no MemAvailable in Linux before 3.14.
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 5 kB\n")
    assert available_memory(tmp_path) == 4_096_000
    monkeypatch.setattr("os.sysconf", lambda name: int("unrecognized configuration name"))
    assert available_memory(tmp_path) is None
