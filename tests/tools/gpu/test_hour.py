"""The measurement on a GPU, at toy sizes on the CPU: a step that fails or hangs stops no other step."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from processes import forked
from scripts import ROOT, load, run

from relvit.ops.attention import BACKENDS

hour, benchmark, report = map(load, ("hour", "benchmark", "benchmark_report"))


class Run(NamedTuple):
    """The results of one measurement: its exit status, its folder, its steps by name, and the printed text."""

    status: int
    folder: Path
    steps: dict
    printed: str


def measure(folder, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = hour.main(["--toy", "--output", str(folder), *arguments])
    return Run(status, folder, json.loads((folder / "summary.json").read_text())["steps"], printed.getvalue())


class Forked:
    """A step that a fork runs in the place of a new process, which would first import PyTorch and relvit."""

    def __init__(self, command, start_new_session, stdout, stderr, env):
        self.process = forked(run, command[1:], ROOT, env, stdout.name, stdout.name)
        self.pid = self.process.pid

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("step", timeout)
        return self.process.exitcode


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The results of all steps at toy sizes on the CPU."""
    pytest.importorskip("triton")
    new = subprocess.Popen

    def start(command, **options):
        # Triton's interpreter is chosen before Triton is imported, so the step that uses it needs a new process.
        return (new if "tune.py" in command[1] else Forked)(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hour.subprocess, "Popen", start)
        return measure(tmp_path_factory.mktemp("toy"), "--minutes", "20")


@pytest.mark.slow
class TestAllStepsAtToySizes:
    def test_each_step_passes_or_is_left_out(self, toy):
        assert toy.status == 0, toy.printed
        assert list(toy.steps) == ["checks", "models", "compiled", "layers", "retrofit", "rope", "tune"]
        assert {step["status"] for step in toy.steps.values()} <= {"passed", "left out"}
        assert "FAIL" not in toy.steps["checks"]["remark"]

    def test_every_model_but_the_interpreted_one_is_measured(self, toy):
        rows = report.read(toy.folder / "speed.jsonl")
        measured = {row["name"] for row in rows if row["level"] == "model"}
        assert measured == set(hour.MODELS) - {"relvit_small_triton"}
        assert {row["status"] for row in rows} == {"ok"}
        compiles = toy.steps["compiled"]["status"] == "passed"
        assert {row["compiled"] for row in rows} == ({False, True} if compiles else {False})

    def test_retrofits_compute_the_same_and_only_flex_attention_has_no_backward_on_the_cpu(self, toy):
        retrofits = [json.loads(line) for line in (toy.folder / "retrofit.jsonl").open()]
        variants = [(row["action"], name, each) for row in retrofits for name, each in row["variants"].items()]
        assert all(each["difference"] < 1e-5 for _, _, each in variants if each["status"] == "ok")
        assert [(action, name) for action, name, each in variants if each["status"] != "ok"] == [("step", "flex")]

    def test_all_tiles_are_tuned(self, toy):
        tuned = [json.loads(line) for line in (toy.folder / "tune.jsonl").open()]
        assert [row["status"] for row in tuned] == ["ok"] * 6

    def test_the_summary_is_printed_and_has_layers_retrofits_and_tiles(self, toy):
        text = (toy.folder / "summary.md").read_text()
        assert text in toy.printed
        for part in ("| layer, 64 px, train | relvit_auto |", "timm-sam, 48 px, batch 1, step: source", "BLOCKS = {"):
            assert part in text

    def test_few_files_are_left_since_a_machine_may_give_back_few(self, toy):
        assert len(list(toy.folder.iterdir())) <= 8


def commands():
    """The results of steps of which one fails, one hangs and one is left out."""
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
    return made


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hour, "LEAST", 0.1)
        patch.setattr(hour, "steps", lambda *_, **__: commands())
        return measure(tmp_path_factory.mktemp("disturbed"), "--minutes", "2")


def test_a_step_that_fails_or_hangs_stops_no_other(disturbed):
    assert disturbed.status == 1
    assert [(step["status"], step["remark"]) for step in disturbed.steps.values()] == [
        ("FAILED", "a check failed: 3 ok, 1 FAIL"),
        ("FAILED", "exit status 1: ValueError: no | kernel"),
        ("FAILED", "stopped after 1 seconds: begun"),
        ("left out", "no compiler"),
        ("passed", ""),
    ]


def test_the_summary_has_errors_and_the_last_lines_of_the_steps(disturbed):
    text = (disturbed.folder / "summary.md").read_text()
    assert "ValueError: no / kernel |" in text
    assert "## checks\n\nFAIL cross, triton\n\n## tune\n\n| best |\n" in text


def test_a_step_that_is_run_again_replaces_its_own_result_alone(disturbed, tmp_path, monkeypatch):
    shutil.copy(disturbed.folder / "summary.json", tmp_path)
    monkeypatch.setattr(hour, "LEAST", 0.1)
    again = [hour.Step("models", [sys.executable, "-c", "print(2)"], 1)]
    monkeypatch.setattr(hour, "steps", lambda *_, **__: commands()[:1] + again)
    run = measure(tmp_path, "--steps", "models")
    assert run.status == 0
    assert [step["status"] for step in run.steps.values()] == ["FAILED", "passed", "FAILED", "left out", "passed"]


def test_without_time_no_step_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(hour, "steps", lambda *_, **__: commands())
    found = measure(tmp_path, "--minutes", "0").steps
    assert {step["remark"] for step in found.values()} == {"no time was left", "no compiler"}


def test_an_interrupted_measurement_ends_its_step(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            started.append(self)
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(hour.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        hour.run(hour.Step("layers", [sys.executable, "-c", "import time; time.sleep(60)"], 1), tmp_path, 60)
    assert started[0].returncode == -hour.signal.SIGKILL


@pytest.mark.slow
def test_the_core_s_packages_are_enough():
    code = "import sys; sys.modules |= dict.fromkeys(('jsonargparse', 'lightning', 'torchmetrics', 'sklearn'))\n"
    code += "import hour, gpu_check, benchmark, retrofit_times, tune"
    folders = (ROOT, *(ROOT / "tools" / name for name in ("", "gpu", "retrofit")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_names_are_those_of_the_benchmark_with_every_backend_for_a_gpu(tmp_path):
    assert set(hour.LAYERS) <= set(benchmark.LAYERS)
    assert set(hour.MODELS).union(*hour.COMPILED.values()) <= set(benchmark.MODELS)
    ways = set(BACKENDS) - {"reference", "tiled", "gathered"}
    assert {f"relvit_small_{way}" for way in ways} < set(hour.MODELS)
    assert {f"relvit_{way}" for way in ways} < set(hour.LAYERS)
    # The steps before the last one leave time for the last one.
    assert sum(step.part for step in hour.steps(tmp_path, toy=False)[:-1]) <= 0.9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("tool", ["hour", "tune"])
def test_without_a_card_it_names_the_option(tool, tmp_path):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"torch sees no GPU: .* on the CPU with --toy"):
        load(tool).main(["--output", str(tmp_path)])


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
    # Rows of an earlier run in the same setting are not shown.
    assert hour.of_speed([rows[0] | {"run": "0"}, *rows]) == [
        "| model, 224 px, compiled, train | plain | 150.00 | 1.00 | 1.00 |",
        "| model, 224 px, compiled, train | rope | 400.00 | 2.50 | 1.00 |",
        "| model, 224 px, compiled, train | lean | failed: a / b | – | – |",
    ]


def test_the_summary_has_both_runs_of_compiled_models():
    row = {"level": "model", "size": 224, "mode": "train", "compiled": True, "memory_bytes": 4, "status": "ok"}
    runs = {"1": ("plain", "relvit_small"), "2": ("plain", "rope")}
    rows = [row | {"run": run, "name": name, "seconds": [0.1]} for run, names in runs.items() for name in names]
    assert [line.split(" | ")[1] for line in hour.of_speed(rows)] == ["plain", "relvit_small", "plain", "rope"]
