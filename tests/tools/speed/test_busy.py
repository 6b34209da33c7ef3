"""Times beside other processes: each case is measured alone and beside endless loops, with both waiting policies."""

from contextlib import nullcontext

import pytest
from scripts import load

tool = load("busy")


def test_the_table_has_medians_of_idle_and_busy_rounds(capsys, monkeypatch):
    times = {"SAM block, timm": (1.0, 3.0), "digits epoch": (2.0, 5.0)}
    loops = []
    monkeypatch.setattr(tool, "busy", lambda count: nullcontext(loops.append(count)))
    monkeypatch.setattr(tool, "measure", lambda case, environment, steps: times[case][loops[-1] > 0])
    tool.main(["--cases", *times, "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert "| SAM block, timm | relvit's waiting | 1000 | 3000 | 3.0 |" in lines
    assert "| digits epoch | PyTorch's waiting | 2000 | 5000 | 2.5 |" in lines
    assert len(loops) == 2 * 2 * 2 * 2


@pytest.mark.slow
def test_it_measures_a_case_in_a_process_of_its_own():
    assert 0 < tool.measure("relvit_tiny step", {}, 1) < tool.PATIENCE
