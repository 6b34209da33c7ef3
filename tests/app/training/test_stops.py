"""Trainings in two processes that end by a signal (also Slurm's) or lose a process, and are resumed."""

import os
import signal
import sys
import time

import pytest
import torch
from processes import ROOT, TORCHRUN, Ranks, as_srun, as_torchrun, finish, start
from scripts import load

pytestmark = pytest.mark.slow

PROOF = load("resume_proof")
# The training processes import this module by its name.
sys.path.append(str(ROOT / "tools"))
WHOLE = PROOF.EPOCHS * PROOF.BATCHES


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return PROOF.make_images(tmp_path_factory.mktemp("images"))


def flags(images, folder, callback="resume_proof.Interrupt"):
    # With 28 images each of two processes has seven batches.
    data = [f"--data.root={images}", "--data.batch_size=2", "--data.num_workers=1", f"--runs={folder / 'runs'}"]
    return ["fit", *PROOF.CONFIGURATION.split(), *data, f"--trainer.callbacks={callback}"]


def counting(folder, name, launcher=as_torchrun, **second):
    """Return the environments of two processes that count their steps; the second one may get further variables."""
    environments = launcher()
    for rank, environment in enumerate(environments):
        environment |= {PROOF.PLACE: "", PROOF.END: "", PROOF.COUNT: str(folder / f"{name}.{rank}")}
    environments[1] |= second
    return environments


def steps(folder, name):
    """Read the number of batches of each process."""
    return [(folder / f"{name}.{rank}").stat().st_size for rank in (0, 1)]


def run_of(folder):
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def uninterrupted(images, tmp_path_factory):
    """The folder of a training without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ranks = Ranks(flags(images, folder), folder, counting(folder, "steps"))
    assert ranks.finish() == [0, 0], ranks.text()
    assert steps(folder, "steps") == [WHOLE, WHOLE]
    return run_of(folder)


def check_resume(uninterrupted, folder):
    """Resume in two processes, and compare the results with the uninterrupted training."""
    ranks = Ranks(["fit", f"--resume={run_of(folder)}"], folder, counting(folder, "after"))
    assert ranks.finish() == [0, 0], ranks.text()
    assert 0 < steps(folder, "after")[0] < WHOLE
    assert PROOF.differences(uninterrupted, run_of(folder)) == []


@pytest.mark.parametrize("place", ["mid-epoch", "validation"])
def test_all_stop_at_the_same_step_when_one_is_stopped_and_go_on_exactly(images, uninterrupted, tmp_path, place):
    struck = {PROOF.PLACE: place, PROOF.END: "SIGTERM"}
    ranks = Ranks(flags(images, tmp_path), tmp_path, counting(tmp_path, "steps", **struck))
    assert ranks.finish() == [143, 143], ranks.text()
    assert len(set(steps(tmp_path, "steps"))) == 1
    assert ranks.text().count("Stopped by SIGTERM. To go on: relvit fit --resume ") == 1
    check_resume(uninterrupted, tmp_path)


def test_the_signal_of_slurm_before_the_end_saves_once_and_ends_with_138(images, uninterrupted, tmp_path):
    # The process itself must not call scontrol, because only the job's script may queue the job again.
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\ntouch {tmp_path}/called\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    struck = {PROOF.PLACE: "mid-epoch", PROOF.END: "SIGUSR1"}
    environments = [each | path for each in counting(tmp_path, "steps", as_srun, **struck)]
    ranks = Ranks(flags(images, tmp_path), tmp_path, environments)
    assert ranks.finish() == [128 + signal.SIGUSR1] * 2, ranks.text()
    assert len(set(steps(tmp_path, "steps"))) == 1
    assert sorted(path.name for path in run_of(tmp_path).rglob("*.ckpt")) == ["best.ckpt", "epoch.ckpt", "last.ckpt"]
    assert "effective batch 4 (2 x 1 x 2: batch, accumulation, devices)" in ranks.text()
    assert not (tmp_path / "called").exists()
    check_resume(uninterrupted, tmp_path)


def test_a_process_that_is_killed_ends_the_other_and_the_run_goes_on_exactly(images, uninterrupted, tmp_path):
    struck = {PROOF.PLACE: "mid-epoch", PROOF.END: "SIGKILL"}
    ranks = Ranks(flags(images, tmp_path), tmp_path, counting(tmp_path, "steps", **struck))
    assert ranks.finish(seconds=90) == [1, -signal.SIGKILL]
    assert "relvit fit: error: " in ranks.text()
    check_resume(uninterrupted, tmp_path)


def test_a_killed_loader_worker_ends_the_run_which_goes_on(images, tmp_path):
    ranks = Ranks(flags(images, tmp_path, "failures.KillWorker"), tmp_path, [{}])
    assert ranks.finish() == [1]
    assert "relvit fit: error: a process that loads images " in ranks.text()
    last = torch.load(run_of(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    # PyTorch notices the end of a worker immediately, or when it needs the next batch.
    assert last["position"]["epoch"] == 1
    assert 1 <= last["position"]["batch"] < 14
    assert Ranks(["fit", f"--resume={run_of(tmp_path)}"], tmp_path, [{}]).finish() == [0]
    last = torch.load(run_of(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["position"]["epoch"] == PROOF.EPOCHS


def test_torchrun_and_all_its_processes_are_stopped(images, tmp_path):
    # Both processes append to one file.
    count = tmp_path / "steps"
    environment = {PROOF.PLACE: "", PROOF.END: "", PROOF.COUNT: str(count)}
    process = start([*flags(images, tmp_path), "--trainer.max_epochs=1000"], tmp_path, TORCHRUN, env=environment)
    while process.poll() is None and not (count.exists() and count.stat().st_size > 20):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    status, out, err = finish(process)
    assert status != 0
    assert out.count("Stopped by SIGTERM. To go on: relvit fit --resume ") == 1, err[-3000:]
    assert "terminate called" not in err
    last = torch.load(run_of(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert 0 <= count.stat().st_size - 2 * last["global_step"] <= 2
