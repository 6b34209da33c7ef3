"""A training says at its start that other processes want the cores, and says nothing on an idle machine."""

import os

import pytest
from command_line import fit

from relvit.utils.devices import busy_note, cores


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    assert 1 <= cores() <= os.cpu_count()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 4})
    assert cores() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    assert cores() == os.cpu_count()


@pytest.mark.parametrize(("load", "noted"), [(0.0, False), (3.0, False), (3.1, True)])
def test_more_processes_than_cores_are_noted(load, noted, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert (busy_note() is not None) == noted
    assert not noted or busy_note().startswith("Note: 3.1 processes already want the 3 cores")


def test_a_training_says_so_at_its_start(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    fit(photos, tmp_path)
    assert capsys.readouterr().out.count("Note: 99.0 processes") == 1
