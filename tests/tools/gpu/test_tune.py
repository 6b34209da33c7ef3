"""The search for the kernels' tiles: its order, its files, the table that it prints, and what its processes compile."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

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


def test_grids_take_turns_and_the_tiles_of_the_package_come_first():
    every = tune.trials(tune.CASES, "cpu", toy=False)
    for trial, case in zip(every, tune.CASES * 3, strict=False):
        assert trial.case == case
        assert trial.blocks == tune.launch.BLOCKS[tune.key_of(trial.kernel, case.dim, "cpu")]
    # On narrow grids tiles of few rows are left out, so these grids have fewer trials.
    large, middle, narrow = (Counter(trial.case for trial in every[:60])[case] for case in tune.CASES)
    assert large - 1 <= middle <= large <= 2 * narrow


def test_time_that_ends_early_is_shared_by_the_grids(monkeypatch, tmp_path):
    cases, clock = [tune.TOY_CASES[0]._replace(height=height) for height in (2, 3)], [0]

    def outcome(case, *_):
        return [torch.tensor([float(case.height)])]

    def measured(trial, device, exact, allowed):
        clock[0] += 1
        assert exact == outcome(trial.case)
        return {"status": "ok", "ms": 1.0, "error": 0.0}

    fakes = {"TOY_CASES": cases, "compile_all": lambda *_: None, "outcome": outcome, "measured": measured}
    for name, fake in fakes.items():
        monkeypatch.setattr(tune, name, fake)
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])
    tune.main(["--toy", "--minutes", "0.1", "--output", str(tmp_path / "tune.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "tune.jsonl").open()]
    assert [row["grid"][0] for row in rows] == [2, 3] * 3


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_result_that_is_not_finite_is_wrong_without_an_error_that_is_no_json(monkeypatch, wrong):
    monkeypatch.setattr(tune, "outcome", lambda *_: [torch.tensor([wrong])])
    found = tune.measured(tune.Trial(tune.CASES[0], "forward", WHOLE), "cpu", [torch.ones(1)], 1.0)
    assert json.loads(json.dumps(found, allow_nan=False)) == {"status": "wrong", "ms": None, "error": None}
