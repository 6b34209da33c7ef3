"""Trainings in two processes that are told to stop, or of which one is killed, and that go on."""

import os
import signal
import sys
import time

import pytest
import torch
from processes import ROOT, TORCHRUN, Ranks, as_torchrun, finish, start
from scripts import load

PROOF = load("resume_proof")
# The processes find it by name.
sys.path.append(str(ROOT / "tools"))
WHOLE = PROOF.EPOCHS * PROOF.BATCHES


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return PROOF.make_images(tmp_path_factory.mktemp("images"))


def flags(images, runs):
    callback = "--trainer.callbacks=resume_proof.Interrupt"
    # 28 images: seven batches for each process.
    data = [f"--data.root={images}", "--data.batch_size=2"]
    return ["fit", *PROOF.CONFIGURATION.split(), *data, f"--runs={runs}", callback]


def counting(folder, name, **first):
    """Environments of two processes that count their steps; that of the second may hold more."""
    environments = as_torchrun()
    for rank, environment in enumerate(environments):
        environment |= {PROOF.PLACE: "", PROOF.END: "", PROOF.COUNT: str(folder / f"{name}.{rank}")}
    environments[1] |= first
    return environments


def steps(folder, name):
    """Batches of each process."""
    paths = [folder / f"{name}.{rank}" for rank in (0, 1)]
    return [path.stat().st_size if path.exists() else 0 for path in paths]


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """The folder of a training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    ranks = Ranks(flags(images, folder / "runs"), folder, counting(folder, "steps"))
    assert ranks.finish() == [0, 0], ranks.text()
    assert steps(folder, "steps") == [WHOLE, WHOLE]
    (made,) = (folder / "runs").iterdir()
    return made


def go_on(runs, whole, tmp_path):
    """Resume, in two processes, and compare."""
    (made,) = runs.iterdir()
    ranks = Ranks(["fit", f"--resume={made}"], tmp_path, counting(tmp_path, "after"))
    assert ranks.finish() == [0, 0], ranks.text()
    assert 0 < steps(tmp_path, "after")[0] < WHOLE
    assert PROOF.differences(whole, made) == []


@pytest.mark.parametrize("place", ["mid-epoch", "validation"])
def test_all_stop_at_the_same_step_when_one_is_told_to(images, whole, tmp_path, place):
    struck = {PROOF.PLACE: place, PROOF.END: "SIGTERM"}
    ranks = Ranks(flags(images, tmp_path / "runs"), tmp_path, counting(tmp_path, "steps", **struck))
    assert ranks.finish() == [143, 143], ranks.text()
    assert len(set(steps(tmp_path, "steps"))) == 1
    assert ranks.text().count("Stopped by SIGTERM. To go on: relvit fit --resume ") == 1
    go_on(tmp_path / "runs", whole, tmp_path)


def test_a_process_that_is_killed_ends_the_other_and_the_last_checkpoint_goes_on(images, whole, tmp_path):
    struck = {PROOF.PLACE: "mid-epoch", PROOF.END: "SIGKILL"}
    ranks = Ranks(flags(images, tmp_path / "runs"), tmp_path, counting(tmp_path, "steps", **struck))
    started = time.monotonic()
    first, second = ranks.finish(seconds=90)
    assert time.monotonic() - started < 90
    assert second == -signal.SIGKILL
    assert first == 1
    assert "relvit fit: error: " in ranks.text()
    go_on(tmp_path / "runs", whole, tmp_path)


def test_torchrun_and_all_its_processes_are_told_to_stop(images, whole, tmp_path):
    environment = {PROOF.PLACE: "", PROOF.END: "", PROOF.COUNT: str(tmp_path / "steps")}
    process = start([*flags(images, tmp_path / "runs"), "--trainer.max_epochs=1000"], tmp_path, TORCHRUN, env=environment)
    while process.poll() is None and not ((tmp_path / "steps").exists() and (tmp_path / "steps").stat().st_size > 20):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    status, out, err = finish(process)
    assert status != 0
    assert out.count("Stopped by SIGTERM. To go on: relvit fit --resume ") == 1, err[-3000:]
    (made,) = (tmp_path / "runs").iterdir()
    last = torch.load(made / "checkpoints" / "last.ckpt", weights_only=True)
    # Both count in one file.
    assert 0 <= (tmp_path / "steps").stat().st_size - 2 * last["global_step"] <= 2


def test_a_killed_loader_worker_ends_the_run_which_goes_on(images, tmp_path):
    arguments = [*flags(images, tmp_path / "runs")[:-1], "--trainer.callbacks=failures.KillWorker"]
    ranks = Ranks(arguments, tmp_path, [{}])
    assert ranks.finish() == [1]
    assert "relvit fit: error: RuntimeError: DataLoader worker (pid" in ranks.text()
    (made,) = (tmp_path / "runs").iterdir()
    last = torch.load(made / "checkpoints" / "last.ckpt", weights_only=True)
    # It is noticed at once, or where the next batch is missing.
    assert last["position"]["epoch"] == 1
    assert 1 <= last["position"]["batch"] < 14
    assert Ranks(["fit", f"--resume={made}"], tmp_path, [{}]).finish() == [0]
