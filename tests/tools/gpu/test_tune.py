"""The search for the kernels' tiles: the table that it prints, and what its processes compile."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from scripts import load

tune = load("tune")
ROWS, WHOLE = tune.Blocks(128, 64, 8, 2, by_row=True), tune.Blocks(128, 64, 8, 2)


def row(grid, blocks, ms, status="ok"):
    return {"kernel": "forward", "grid": grid, "blocks": blocks, "ms": ms, "status": status}


def chosen(*rows):
    (line,) = (line for line in tune.fastest(rows, 64, "cpu") if line.startswith("    "))
    return line


def test_tiles_that_fail_are_not_chosen_for_the_time_of_others():
    rows = (row((64, 64), ROWS, None, "OutOfResources: shared memory"), row((64, 64), WHOLE, 2.0))
    rows += (row((32, 32), ROWS, 1.0), row((32, 32), WHOLE, 2.0))
    assert chosen(*rows) == "    ('forward', False, False): Blocks(128, 64, 8, 2, False),"


def test_on_a_narrow_grid_tiles_of_few_rows_have_the_time_of_their_shape():
    rows = (row((64, 64), ROWS, 1.0), row((64, 64), WHOLE, 2.0), row((14, 14), WHOLE, 1.0))
    assert chosen(*rows) == "    ('forward', False, False): Blocks(128, 64, 8, 2, True),"


def test_a_process_compiles_the_kernel_of_its_trial_alone(monkeypatch):
    ran = []
    monkeypatch.setattr(tune.Launch, "run", lambda self, *_: ran.append(self.kernel.__name__))

    def outcome(*_):
        for name in tune.KERNELS:
            tune.Launch(SimpleNamespace(__name__=name), None, (0, 1, 1), 1.0, None).run((), ())

    monkeypatch.setattr(tune, "outcome", outcome)
    tune.build(tune.Trial(tune.CASES[0], "backward_keys", WHOLE), "cpu")
    assert ran == ["backward_keys"]
