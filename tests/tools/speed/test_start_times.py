"""The table of start times: the median of each command, and the difference to another command."""

import sys

from scripts import load

tool = load("start_times")


def test_the_table_compares_with_the_baseline(capsys, monkeypatch):
    times = iter([(9.0, 9.0), (9.0, 9.0), (1.0, 0.5), (3.0, 1.5), (2.0, 1.0), (5.0, 3.0)])
    monkeypatch.setattr(tool, "STARTS", (tool.Start("base", ["pass"]), tool.Start("more", ["pass"], "base", 2)))
    monkeypatch.setattr(tool, "seconds", lambda program: next(times))
    monkeypatch.setattr(sys, "argv", ["start_times.py", "--rounds", "2"])
    tool.main()
    *_, base, more = capsys.readouterr().out.splitlines()
    # The first round does not count.
    assert base == "| base | 1.50 | 0.75 |  |  |  |  |"
    assert more == "| more | 4.00 | 2.25 | base | 2.50 | 1.50 | 2 |"


def test_it_measures_a_process():
    wall, busy = tool.seconds(["import time; time.sleep(0.2)"])
    assert wall >= 0.2
    assert busy > 0
    assert {start.beyond for start in tool.STARTS if start.beyond} <= {start.name for start in tool.STARTS}
