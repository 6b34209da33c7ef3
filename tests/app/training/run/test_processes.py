"""Processes that torchrun or Slurm has started, refused numbers and strategies, and the script of a Slurm job."""

import os
import shlex
import stat
import subprocess

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from photos import TINY
from processes import ROOT, as_srun

from relvit.app.cli import main
from relvit.app.training.run.processes import Launch, environment_of, launched, set_devices

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
JOB |= {"SLURM_LOCALID": "0"}
STEP = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.fixture
def surroundings(monkeypatch):
    """Return a function that sets environment variables and removes all other variables of Slurm and torchrun."""

    def put(variables):
        for name in list(os.environ):
            if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("MASTER_ADDR", "MASTER_PORT"):
                monkeypatch.delenv(name)
        # The run may set these variables, so let monkeypatch restore them at the end.
        for name in ("SLURM_NTASKS_PER_NODE", "MASTER_PORT"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (JOB, None),  # The job's script, or a shell of salloc, has this environment.
        # `srun --pty bash` starts a shell with this environment.
        (JOB | STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, None),
        (JOB | STEP | {"SLURM_JOB_NAME": "bash"}, None),
        (JOB | STEP, Launch("srun", 16, 2)),
        # Here srun has started torchrun on each machine.
        (JOB | STEP | TORCHRUN, Launch("torchrun", 4, 2)),
    ],
)
def test_who_has_started_this(surroundings, variables, expected):
    surroundings(variables)
    assert launched() == expected
    environment = environment_of(expected)
    if not variables or (expected and expected.by == "torchrun"):
        assert environment is None
    elif expected is None:
        # The process does not wait for other processes.
        assert not environment.creates_processes_externally
    else:
        assert (environment.world_size(), environment.auto_requeue) == (16, False)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_task_of_srun_in_a_shell_does_not_train_alone(surroundings, name):
    surroundings(JOB | STEP | {"SLURM_JOB_NAME": name, "SLURM_PROCID": "1"})
    with pytest.raises(ValueError, match=f"16 tasks in a job with the name of a shell, {name}, .* SLURM_JOB_NAME="):
        launched()


def test_steps_of_one_job_have_different_ports(surroundings):
    ports = []
    for step in (0, 1):
        surroundings(JOB | STEP | {"SLURM_STEP_ID": str(step)})
        ports.append(environment_of(launched()).main_port)
    assert len({15007, *ports}) == 2


@pytest.mark.parametrize(("nodes", "rank"), [(1, 0), (2, 1)])
def test_the_first_process_of_another_machine_is_not_the_main_process(surroundings, monkeypatch, nodes, rank):
    surroundings({"MASTER_ADDR": "first", "MASTER_PORT": "29500"})
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    options = {"accelerator": "cpu", "devices": 1, "num_nodes": nodes, "strategy": "auto", "plugins": None}
    assert set_devices(options) is None
    assert rank_zero_only.rank == rank


def test_a_task_of_srun_that_sees_its_own_gpu_alone(surroundings, monkeypatch):
    """Lightning would say that gpu [0, 1, 2, 3, 4, 5, 6, 7] is requested, but that the machine only has [0]."""
    surroundings(JOB | STEP)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    options = {"accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": "auto", "plugins": None}
    with pytest.raises(ValueError, match=r"8 tasks .* but this task sees 1 of .*--gpus-per-node 8 in the"):
        set_devices(dict(options))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert set_devices(options) == Launch("srun", 16, 2)


def test_tasks_that_are_not_equally_many_on_each_machine(surroundings):
    surroundings(JOB | STEP | {"SLURM_STEP_TASKS_PER_NODE": "9,7"})
    with pytest.raises(ValueError, match="16 tasks on 2 machines, not the same number on each: give --ntasks-per-node"):
        launched()


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        (
            as_srun()[0],
            ["--trainer.devices=1"],
            "srun has started 2 processes on 1 machine, the trainer is to use 1 on 1 machine: leave out "
            "--trainer.devices and --trainer.num_nodes, or give 2 and 1",
        ),
        (JOB | STEP, ["--trainer.devices=8"], "16 processes on 2 machines, the trainer is to use 8 on 1 machine"),
        (
            JOB,
            ["--trainer.num_nodes=2"],
            "--trainer.num_nodes 2 needs this command on 2 machines: start it by torchrun",
        ),
        ({}, ["--trainer.num_nodes=2"], "--trainer.num_nodes 2 needs this command on 2 machines: start"),
        ({}, ["--trainer.strategy=deepspeed_stage_3"], "strategy deepspeed_stage_3 cannot train here"),
        (TORCHRUN, ["--trainer.devices=1"], "torchrun has started 4 processes on 2 machines, the trainer is to use 1"),
    ],
)
def test_wrong_options_are_refused_at_once(surroundings, photos, tmp_path, fails, variables, flags, message):
    surroundings(variables)
    (tmp_path / "runs" / "another").mkdir(parents=True)
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path / 'runs'}", *TINY, *flags]
    assert message in fails(arguments)
    # The command has removed only the folder that it has made.
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["another"]


def test_one_process_in_a_job_of_many_tasks_does_not_wait(surroundings, photos, tmp_path, capsys):
    surroundings(JOB)
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *TINY]
    assert main([*arguments, "--trainer.fast_dev_run=true"]) == 0
    assert "effective batch 8 (8 x 1 x 1" in capsys.readouterr().out


def program(path, text):
    """Write a shell script that stands in for a program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_jobs_script_begins_goes_on_and_queues_again(tmp_path):
    script = ROOT / "configs" / "cluster" / "train.sbatch"
    options = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=SIGUSR1@120", "--requeue", "--ntasks-per-node=8", "--gpus-per-node=8"} <= set(options)
    # These scripts append their arguments to the file `calls`; srun's also leaves a checkpoint and returns a given
    # status.
    program(tmp_path / "bin" / "scontrol", 'echo "scontrol $*" >> calls')
    leave = "mkdir -p runs/job_7/2026_x/checkpoints; touch runs/job_7/2026_x/checkpoints/last.ckpt"
    program(tmp_path / "bin" / "srun", f'printf "%q " srun "$@" >> calls; echo >> calls; {leave}; exit $STATUS')

    def submit(status):
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STATUS": str(status)}
        (tmp_path / "calls").unlink(missing_ok=True)
        given = ["--config", "a file.yaml"]
        done = subprocess.run(
            ["bash", script, *given], cwd=tmp_path, env=environment | {"SLURM_JOB_ID": "7"}, timeout=60
        )
        assert done.returncode == status
        return [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]

    begin, again = submit(138)
    assert begin[begin.index("relvit") :] == ["relvit", "fit", "--runs", "runs/job_7", "--config", "a file.yaml"]
    assert again == ["scontrol", "requeue", "7"]
    for status in (0, 1, 143):
        (go_on,) = submit(status)
        assert go_on[go_on.index("relvit") :] == ["relvit", "fit", "--resume", "runs/job_7/2026_x"]
