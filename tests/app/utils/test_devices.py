"""Names of devices, and a note if other processes use the cores; `test_number_types` tests the note of a training."""

import os

import pytest
import torch

from relvit.app.utils.devices import busy_note, cores, find_device


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    assert 1 <= cores() <= os.cpu_count()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 4})
    assert cores() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    assert cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        # The group around the process's own group has the lower limit. A part of a core needs a process, too.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "25000 50000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_a_container_may_be_given_fewer_cores(tmp_path, monkeypatch, files, count):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(tmp_path) == count


@pytest.mark.parametrize(("load", "noted"), [(0.0, False), (3.0, False), (3.1, True)])
def test_more_processes_than_cores_are_noted(load, noted, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert (busy_note() is not None) == noted
    assert not noted or busy_note().startswith("Note: 3.1 processes already want the 3 cores")


def test_names_that_pytorch_does_not_know_are_told_its_own():
    with pytest.raises(ValueError, match=r"device is 'gpu', .* \(did you mean 'cuda'\?\); allowed are auto, cpu, cuda"):
        find_device("gpu")
    with pytest.raises(ValueError, match=r"device is 'gpu1', .* \(did you mean 'cuda'\?\)"):
        find_device("gpu1")
    with pytest.raises(ValueError, match=r"device is 'cud:1', .* \(did you mean 'cuda'\?\)"):
        find_device("cud:1")
    assert find_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is such a device")
def test_devices_that_are_not_there_have_a_short_reason():
    with pytest.raises(ValueError, match="cannot compute on device 'mps': ") as raised:
        find_device("mps")
    assert len(str(raised.value)) < 260
