"""The hour on a GPU, at toy sizes on the CPU: its steps run, one that fails stops no other; the rule for 'triton'."""

import json
import re
import sys

import pytest
import torch
from scripts import load

hour, benchmark = load("hour"), load("benchmark")


@pytest.mark.slow
def test_steps_at_toy_sizes(tmp_path, capsys):
    # The other two begin programs that test_gpu_check.py and test_benchmark.py run.
    names = ["layers", "report", "sam", "recipe"]
    assert hour.main(["--toy", "--output", str(tmp_path), "--steps", *names]) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "summary.json").read_text())
    assert {name: step["status"] for name, step in found["steps"].items()} == dict.fromkeys(names, "passed")
    assert found["rule"].startswith("No rule: 'triton' was not measured")
    assert found["steps"]["recipe"]["remark"].startswith("test accuracy 0.")
    text = (tmp_path / "summary.md").read_text()
    assert "| `relvit_tiled` |" in text
    assert "| timm-sam | 32 x 48 |" in text
    assert all((tmp_path / name).exists() for name in ("layers.png", "speed.png", "sam.log", "recipe.log"))


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    codes = {
        "checks": "print('ok   cross, AxisTables kv, triton, float16'); print('ok   other')",
        "kernels": "raise ValueError('no | kernel')",
        "layers": "import time; print('begun', flush=True); time.sleep(60)",
        "models": "print(1)",
    }
    made = [
        hour.Step(name, [sys.executable, "-c", code], 1 / 60 + 1 * (name != "layers")) for name, code in codes.items()
    ]
    monkeypatch.setattr(hour, "steps", lambda *_, **__: [*made, hour.Step("sam", [], 1, "no library")])
    assert hour.main(["--toy", "--output", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert [step["status"] for step in found.values()] == ["passed", "FAILED", "FAILED", "passed", "left out"]
    assert found["checks"]["remark"] == "2 checks, of the kernels 1"
    assert found["kernels"]["remark"] == "exit status 1: ValueError: no | kernel"
    assert found["layers"]["remark"].startswith("stopped after 0.0166667 minutes: begun")
    assert "ValueError: no / kernel |" in (tmp_path / "summary.md").read_text()
    # The steps that are run again replace what they gave before, others stay.
    made[1] = hour.Step("kernels", [sys.executable, "-c", "print(2)"], 1)
    assert hour.main(["--toy", "--output", str(tmp_path), "--steps", "kernels"]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert [step["status"] for step in found.values()] == ["passed", "passed", "FAILED", "passed", "left out"]


@pytest.mark.parametrize(
    ("triton", "begins"),
    [
        # By size: a multiple of stock attention's time, forward and in training; the fastest of the others takes 1.5.
        ({224: (1.4, 1.4), 512: (1.4, 1.4)}, "In `_choose` .* width is 92 or more: from 224 px on"),
        ({224: (1.4, 1.6), 512: (1.5, 1.4)}, "In `_choose` .* width is 128 or more: from 512 px on"),
        ({224: (1.4, 1.4), 512: (1.6, 1.4)}, "Keep .* at 512 px it was slower"),
        ({224: (1.4, 1.4), 512: (1.4, None)}, "Keep .* at 512 px it was slower"),
        ({}, "No rule"),
    ],
)
def test_the_rule_is_the_least_width_from_which_the_kernels_win(triton, begins):
    found = {
        (size, mode): {"relvit_fused": 1.5, "relvit_tiled": 2.0} for size in (224, 512) for mode in ("forward", "train")
    }
    for size, ratios in triton.items():
        for mode, ratio in zip(("forward", "train"), ratios, strict=True):
            found[size, mode] |= {} if ratio is None else {"relvit_triton": ratio}
    assert re.match(begins, hour.rule(found, {"status": "passed"}))
    if triton:
        assert "`checks` has not passed" in hour.rule(found, {"status": "FAILED"})


def test_commands_name_options_that_the_tools_have(tmp_path):
    commands = {step.name: step.command for step in hour.steps(tmp_path, tmp_path, toy=False)}
    assert set(hour.LAYERS) <= set(benchmark.LAYERS)
    assert set(hour.MODELS) | set(hour.COMPILED) <= set(benchmark.MODELS)
    assert commands["recipe"][2:6] == ["relvit", "fit", "--config", "cifar10"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_it_names_the_option(tmp_path):
    with pytest.raises(ValueError, match=r"torch sees no GPU: .* on the CPU with --toy"):
        hour.main(["--output", str(tmp_path)])
