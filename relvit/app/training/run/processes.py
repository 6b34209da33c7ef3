"""Set up the processes of a run that Lightning, torchrun or srun (Slurm) starts, and end a run that loses a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.app.training.optim.strategy import check_strategy
from relvit.app.utils.devices import cores
from relvit.app.utils.exceptions import LostProcessError
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import did_you_mean

# If another process of the group has ended, gloo and NCCL raise errors with one of these texts.
LOST = r"(?i)connection (was )?(closed|reset|refused)|remote worker|broken pipe|remote process exited|timed out"
OUT_OF_MEMORY = ", as the system does where memory runs out"
# A job of Slurm that is an interactive shell has one of these names by default.
SHELLS = ("bash", "interactive")
# If another process fails, the main process gets this many seconds to end by itself, before Lightning kills it.
PATIENCE = 60


class Launch(NamedTuple):
    """The processes on all machines, including this one, that torchrun or srun has started."""

    by: Literal["torchrun", "srun"]
    processes: int
    nodes: int

    @property
    def per_node(self) -> int:
        """The number of processes on each machine."""
        return self.processes // self.nodes


class SrunTasks(SLURMEnvironment):
    """The tasks of srun as Lightning's cluster environment, without Lightning's way to queue the job again.

    When Slurm sends a signal, a run of relvit saves a checkpoint and ends. To go on, the job's script queues the job
    again.
    """

    def __init__(self) -> None:
        # Lightning needs the variable SLURM_NTASKS_PER_NODE, but Slurm sets it only if the job has the option
        # --ntasks-per-node.
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(_tasks() // _nodes()))
        # Lightning makes the port from the job's number alone, but steps of one job may run on a machine together.
        job, step = (int(os.environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        os.environ.setdefault("MASTER_PORT", str(15000 + (job + 1013 * step) % 10000))
        super().__init__(auto_requeue=False)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing, as `check_processes` compares the tasks of srun; Lightning would compare the tasks of the job."""


def set_devices(options: dict[str, Any]) -> Launch | None:
    """Check a trainer's options of devices, set them to the processes of torchrun or srun, and return `launched()`.

    Raises:
        ValueError: This machine does not have the devices, or a task of srun does not see them; or the strategy divides
            the weights among devices, or gives each process a copy of the run's objects.
    """
    check_devices(options["accelerator"], options["devices"])
    check_strategy(options["strategy"])
    strategy = options["strategy"]
    start = strategy if isinstance(strategy, str) else getattr(strategy, "_start_method", None) or ""
    if re.search("spawn|fork|notebook", start):
        # With these strategies each process works on a copy of the run's objects, so the main process would not get the
        # results, which are in the copies.
        raise ValueError(
            f"--trainer.strategy {start} copies the main process, which relvit does not support: give ddp, which runs "
            "the command again for each device"
        )
    launch = launched()
    seen = torch.cuda.device_count() if options["accelerator"] != "cpu" else 0
    if launch is not None and launch.by == "srun" and 0 < seen < launch.per_node:
        raise ValueError(
            f"srun has started {launch.per_node} tasks on each machine, but this task sees {seen} of the GPUs: give "
            f"--gpus-per-node {launch.per_node} in the place of --gpus-per-task, or add --gpu-bind=none, so that every "
            "task sees all GPUs of its machine"
        )
    if launch is None and options["num_nodes"] > 1:
        # Without a trainer, Lightning assumes that the first process of each machine is the main process. But only one
        # process may make and lock the run's folder, so set the rank from the number of the machine.
        rank_zero_only.rank = rank_zero_only.rank or int(os.environ.get("NODE_RANK", 0))
    if options["devices"] == "auto" and launch is not None:
        options["devices"], options["num_nodes"] = launch.per_node, launch.nodes
    environment = environment_of(launch)
    plugins = as_list(options["plugins"])
    if environment is not None and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins.append(environment)
    options["plugins"] = plugins or None
    return launch


def launched() -> Launch | None:
    """Return how torchrun or srun has started this process; None if this is the only process so far.

    In a job of Slurm a process is alone if a shell (`srun --pty bash`, `salloc`) or the job's script has started it,
    whatever the job's number of tasks.

    Raises:
        ValueError: srun has started more tasks on one machine than on another, or several tasks in a job that has the
            name of a shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return Launch("torchrun", processes, processes // here)
    tasks, nodes, name = _tasks(), _nodes(), os.environ.get("SLURM_JOB_NAME")
    if name in SHELLS and int(os.environ.get("SLURM_PROCID", 0)):
        # A shell is always task 0, so this process is another task of srun, which must not train alone, because only
        # task 0 makes the run's folder.
        raise ValueError(
            f"srun has started {tasks} tasks in a job with the name of a shell, {name}, so each would train alone: put "
            "SLURM_JOB_NAME=relvit before srun, or give salloc another --job-name"
        )
    # A shell that `srun --pty` has started has a terminal, which other tasks of srun do not have, so a terminal means
    # that this process is in such a shell.
    in_shell = name in SHELLS or (sys.stdin is not None and sys.stdin.isatty())
    if tasks < 2 or in_shell:
        return None
    if tasks % nodes or "," in os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""):
        raise ValueError(
            f"srun has started {tasks} tasks on {nodes} machines, not the same number on each: give --ntasks-per-node, "
            "the number of GPUs of a machine"
        )
    return Launch("srun", tasks, nodes)


def environment_of(launch: Launch | None) -> ClusterEnvironment | None:
    """Return the cluster environment that Lightning is to use; None lets Lightning detect one."""
    if launch is not None:
        return SrunTasks() if launch.by == "srun" else None
    # In a job of Slurm, Lightning waits for all tasks of the job, even if this process is alone, so return
    # `LightningEnvironment`, with which Lightning does not wait.
    return LightningEnvironment() if "SLURM_NTASKS" in os.environ else None


def check_devices(accelerator: Any, devices: Any) -> None:
    """Refuse a kind of device that this machine does not have, and a wrong number of devices.

    Lightning refuses such devices, too, but its errors do not name the options.

    Raises:
        ValueError: The machine has no such device, or `devices` is not a number of devices.
    """
    kinds = AcceleratorRegistry.available_accelerators()
    found = [kind for kind in sorted(kinds) if AcceleratorRegistry[kind]["accelerator"].is_available()]
    found += ["gpu"] if {"cuda", "mps"} & set(found) else []
    if isinstance(accelerator, str) and accelerator not in ("auto", *found):
        # Suggest another name only if Lightning does not know the given name: a name that Lightning knows is right, and
        # the device itself is missing.
        hint = "" if accelerator in (*kinds, "gpu") else did_you_mean(accelerator, ("auto", *found))
        raise ValueError(f"--trainer.accelerator {accelerator}: this machine has auto, {', '.join(found)}{hint}")
    if accelerator == "cpu" or found == ["cpu"]:
        allowed, words = r"auto|[1-9]\d*", "a number of processes or auto"
    else:
        allowed, words = r"auto|-1|[1-9]\d*|\d+,[\d, ]*|\[.*\]", "a number, -1 for all, indices such as [0,2], or auto"
    if not re.fullmatch(allowed, str(devices)):
        raise ValueError(f"--trainer.devices must be {words}, got {devices}")


def check_processes(launch: Launch | None, trainer: Trainer) -> None:
    """Refuse a number of processes that differs from the trainer's: some would wait for processes that never start.

    Raises:
        ValueError: The numbers differ; several machines are to be used, but no process runs on the other machines; or
            this machine would start more processes than it has cores.
    """
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if launch is None and isinstance(trainer.accelerator, CPUAccelerator) and devices > cores():
        raise ValueError(
            f"--trainer.devices {devices}: each process on the CPU needs a core, so give {cores()} or fewer"
        )
    if launch is not None and (launch.per_node, launch.nodes) != (devices, nodes):
        raise ValueError(
            f"{launch.by} has started {counted(launch.processes, 'process')} on {counted(launch.nodes, 'machine')}, "
            f"the trainer is to use {devices * nodes} on {counted(nodes, 'machine')}: leave out --trainer.devices and "
            f"--trainer.num_nodes, or give {launch.per_node} and {launch.nodes}"
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    alone = isinstance(environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ
    if launch is None and nodes > 1 and alone:
        raise ValueError(
            f"--trainer.num_nodes {nodes} needs this command on {nodes} machines: start it by torchrun or srun, see "
            "--config multi_node"
        )


class PatientLauncher(Callback):
    """Give the main process a minute to end by itself if a process that it has started fails.

    The main process then closes its files, draws its curves and returns the exit status of the process that failed.
    Lightning would kill all processes, including the main process, within seconds.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        processes = _started(trainer)
        processes[:] = [PatientProcess(each) if isinstance(each, subprocess.Popen) else each for each in processes]


class PatientProcess:
    """A process whose failure `poll` reports at once, but `returncode`, which Lightning reads, only a minute later."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._failed_at: float | None = None

    @property
    def returncode(self) -> int | None:
        """The exit status; None as long as the process runs, and for a minute after it has failed."""
        status = self._process.returncode
        if not status:
            return status
        self._failed_at = self._failed_at or time.monotonic()
        return status if time.monotonic() - self._failed_at > PATIENCE else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def _started(trainer: Trainer) -> list[Any]:
    """Return the list of the other processes that the trainer has started, which may be empty."""
    return getattr(trainer.strategy.launcher, "procs", [])


def explain_lost_process(error: RuntimeError, trainer: Trainer, hint: str) -> Exception | SystemExit:
    """Replace the error of a broken connection by one about the process that has ended; return other errors unchanged.

    If another process has failed, it has printed the reason, so the main process ends with the same exit status and
    prints nothing more. If a signal has ended the other process, or if it is not known which process has ended, the new
    error says how to resume (`hint`).
    """
    if not torch.distributed.is_initialized() or not re.search(LOST, str(error)):
        return error
    if rank_zero_only.rank != 0:
        return SystemExit(1)
    deadline = time.monotonic() + 10
    others = _started(trainer)
    while others and not any(each.poll() for each in others) and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank, status in enumerate((each.poll() for each in others), 1):
        if status and status > 0:
            return SystemExit(status)
        if status:
            return LostProcessError(f"process {rank} was ended by {signal.Signals(-status).name}{OUT_OF_MEMORY}{hint}")
    return LostProcessError(f"another process has ended; its own message says why{hint}")


def leave_processes() -> None:
    """Leave the group of processes at the end of a run; Lightning does so only with NCCL.

    If a thread of gloo still runs when the interpreter ends, C++ aborts the process: "terminate called without an
    active exception".
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def as_list(value: Any) -> list[Any]:
    """Return an option of one value or several as a list, which is empty for None."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _tasks() -> int:
    """Return the number of tasks of the Slurm step that this process belongs to, or 0 without a step."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 0))


def _nodes() -> int:
    return int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
