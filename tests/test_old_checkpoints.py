"""Checkpoints and runs written before relvit's folders moved load, predict and resume with the same numbers.

`tests/fixtures/run_of_0_1` is two epochs of `--config digits` with one layer of width 16; the numbers are what that
version itself computed.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import relvit
from relvit.cli import main

RUN = Path(__file__).parent / "fixtures" / "run_of_0_1"
CHECKPOINT = RUN / "checkpoints" / "last.ckpt"


def test_an_old_checkpoint_predicts_as_it_did():
    grey = (np.add.outer(np.arange(24) * 7, np.arange(20) * 5) % 256).astype(np.uint8)
    (prediction,) = relvit.load(CHECKPOINT).predict([np.stack([grey] * 3, -1)])
    assert prediction.names == ["0", "8", "4", "6", "2"]
    assert prediction.probabilities == pytest.approx([0.131044, 0.1299727, 0.1140565, 0.1090439, 0.0985858], abs=1e-5)


def test_an_old_run_resumes_where_it_was(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    assert main(["fit", "--resume", str(tmp_path / "run"), "--epochs", "3", "--accelerator", "cpu"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["test/loss"] == pytest.approx(2.2128365, abs=1e-4)


def test_a_command_and_a_training_read_an_old_checkpoint(tmp_path, capsys):
    assert main(["validate", str(CHECKPOINT), "--accelerator=cpu"]) == 0, capsys.readouterr().err
    start = ["fit", f"--model.pretrained={CHECKPOINT}", "--data=DigitsData", f"--runs={tmp_path}"]
    assert main([*start, "--trainer.fast_dev_run=true"]) == 0, capsys.readouterr().err
