"""The measurement on a GPU, at toy sizes on the CPU: its steps run, one that fails or hangs stops no other."""

import json
import re
import sys
from types import ModuleType

import pytest
import torch
from scripts import load

from relvit.ops.attention import BACKENDS

hour, benchmark, report = map(load, ("hour", "benchmark", "benchmark_report"))


@pytest.mark.slow
def test_all_steps_at_toy_sizes(tmp_path, capsys):
    pytest.importorskip("triton")
    assert hour.main(["--toy", "--minutes", "20", "--output", str(tmp_path)]) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert list(found) == ["checks", "models", "compiled", "layers", "retrofit", "rope", "tune"]
    assert {step["status"] for step in found.values()} <= {"passed", "left out"}
    assert "FAIL" not in found["checks"]["remark"]
    rows = report.read(tmp_path / "speed.jsonl")
    assert {row["name"] for row in rows if row["level"] == "model"} == set(hour.MODELS) - {"relvit_small_triton"}
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["compiled"] for row in rows} == ({False, True} if found["compiled"]["status"] == "passed" else {False})
    retrofits = [json.loads(line) for line in (tmp_path / "retrofit.jsonl").open()]
    for row in retrofits:
        assert all(each["difference"] < 1e-5 for each in row["variants"].values() if each["status"] == "ok")
    # The CPU has no backward of FlexAttention.
    failed = [
        (row["action"], name) for row in retrofits for name, each in row["variants"].items() if each["status"] != "ok"
    ]
    assert failed == [("step", "flex")]
    tuned = [json.loads(line) for line in (tmp_path / "tune.jsonl").open()]
    assert [row["status"] for row in tuned] == ["ok"] * 6
    text = (tmp_path / "summary.md").read_text()
    assert text in capsys.readouterr().out
    for part in ("| layer, 64 px, train | relvit_auto |", "timm-sam, 48 px, batch 1, step: source", "BLOCKS = {"):
        assert part in text
    # What a machine gives back may be few files.
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hour, "LEAST", 0.1)
    codes = {
        "checks": "print('FAIL cross, triton'); print('3 ok, 1 FAIL')",
        "models": "raise ValueError('no | kernel')",
        "layers": "import time; print('begun', flush=True); time.sleep(60)",
        "tune": "print('| best |')",
    }
    made = [
        hour.Step(name, [sys.executable, "-c", code], 0.01 if name == "layers" else 1) for name, code in codes.items()
    ]
    made.insert(3, hour.Step("compiled", [], 1, "no compiler"))
    monkeypatch.setattr(hour, "steps", lambda *_, **__: made)
    assert hour.main(["--toy", "--output", str(tmp_path), "--minutes", "2"]) == 1
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert [step["status"] for step in found.values()] == ["passed", "FAILED", "FAILED", "left out", "passed"]
    assert found["checks"]["remark"] == "3 ok, 1 FAIL"
    assert found["models"]["remark"] == "exit status 1: ValueError: no | kernel"
    assert found["layers"]["remark"] == "stopped after 1 seconds: begun"
    text = (tmp_path / "summary.md").read_text()
    assert "ValueError: no / kernel |" in text
    assert "## checks\n\nFAIL cross, triton\n\n## tune\n\n| best |\n" in text
    # The steps that are run again replace what they gave before, others stay.
    made[1] = hour.Step("models", [sys.executable, "-c", "print(2)"], 1)
    assert hour.main(["--toy", "--output", str(tmp_path), "--steps", "models"]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert [step["status"] for step in found.values()] == ["passed", "passed", "FAILED", "left out", "passed"]
    # Without time no step begins.
    assert hour.main(["--toy", "--output", str(tmp_path), "--minutes", "0"]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert {step["remark"] for step in found.values()} == {"no time was left", "no compiler"}


def test_names_are_those_of_the_benchmark_with_every_backend_for_a_gpu(tmp_path):
    assert set(hour.LAYERS) <= set(benchmark.LAYERS)
    assert set(hour.MODELS).union(*hour.COMPILED.values()) <= set(benchmark.MODELS)
    ways = set(BACKENDS) - {"reference", "tiled", "gathered"}
    assert {f"relvit_small_{way}" for way in ways} < set(hour.MODELS)
    assert {f"relvit_{way}" for way in ways} < set(hour.LAYERS)
    # The steps before the last one leave time for it.
    assert sum(step.part for step in hour.steps(tmp_path, toy=False)[:-1]) <= 0.9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("tool", ["hour", "tune"])
def test_without_a_card_it_names_the_option(tool, tmp_path):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"torch sees no GPU: .* on the CPU with --toy"):
        load(tool).main(["--output", str(tmp_path)])


def test_an_older_timm_is_answered_with_what_to_install(monkeypatch):
    # Where timm is too old, importing relvit and with it the benchmark fails.
    monkeypatch.delitem(sys.modules, "hour")
    monkeypatch.setitem(sys.modules, "benchmark", ModuleType("benchmark"))
    with pytest.raises(ImportError, match="this machine may have an older one") as raised:
        load("hour")
    (command,) = re.findall(r'pip install --no-deps --target packages "timm>=[\d.]+"', str(raised.value))
    assert command in hour.__doc__


def test_times_of_a_summary():
    row = {
        "level": "model",
        "size": 224,
        "mode": "train",
        "compiled": True,
        "run": "1",
        "memory_bytes": 4,
        "status": "ok",
    }
    rows = [row | {"name": "plain", "seconds": [0.1, 0.2]}, row | {"name": "rope", "seconds": [0.2, 0.6]}]
    rows += [row | {"name": "lean", "seconds": [], "memory_bytes": None, "status": "failed: a | b"}]
    # Of an earlier run of the same, nothing is shown.
    assert hour.of_speed([rows[0] | {"run": "0"}, *rows]) == [
        "| model, 224 px, compiled, train | plain | 150.00 | 1.00 | 1.00 |",
        "| model, 224 px, compiled, train | rope | 400.00 | 2.50 | 1.00 |",
        "| model, 224 px, compiled, train | lean | failed: a / b | – | – |",
    ]
