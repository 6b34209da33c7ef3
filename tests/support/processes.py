"""Run the command line in processes: forks of this process, or new processes, as launchers and Lightning start them."""

import fcntl
import multiprocessing
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(arguments, folder, launcher=(), **options):
    """Start `relvit` in a new process, directly or by a launcher (arguments of python); the imports take seconds."""
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    environment |= options.pop("env", {})
    command = [sys.executable, *launcher, "-m", "relvit", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **ends | options)


def finish(process, seconds=240):
    """Return exit status, standard output and standard error; kill a process that takes too long, with its group."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s: {out[-2000:]} {err[-3000:]}") from None
    return process.returncode, out, err


def run(arguments, folder, seconds=240, **environment):
    """Run `relvit` with its output in files; return its exit status, standard output and standard error."""
    with tempfile.TemporaryDirectory() as logs:
        out, err = (Path(logs) / name for name in ("out", "err"))
        process = forked(None, arguments, folder, environment, out, err)
        process.join(seconds)
        if process.is_alive():
            process.kill()
            raise AssertionError(
                f"still running after {seconds} s: {out.read_text()[-2000:]} {err.read_text()[-3000:]}"
            )
        return process.exitcode, out.read_text(), err.read_text()


def in_terminal(arguments, folder, columns=160, seconds=240):
    """Run `relvit` in a pseudo-terminal; return its exit status, and its output without control characters."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {"TERM": "xterm", "COLUMNS": str(columns)}
    process = forked(None, arguments, folder, environment, *[os.ttyname(theirs)] * 2)
    stop = threading.Timer(seconds, os.killpg, (process.pid, 9))
    stop.start()
    written = b""
    while process.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            written += os.read(ours, 65536)
    stop.cancel()
    os.close(theirs)
    os.close(ours)
    return process.exitcode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r", "\n")


def as_torchrun(count=2):
    """Return the environment variables that torchrun gives to each of its processes."""
    common = _meeting() | {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": str(count), "WORLD_SIZE": str(count)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def as_srun(count=2):
    """Return the environment variables that srun gives to each of its tasks on one machine."""
    common = _meeting() | {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "relvit", "SLURM_NODEID": "0"}
    common |= {"SLURM_NTASKS": str(count), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": "1"}
    return [common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(count)]


def _meeting():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


class Ranks:
    """Run a function in a forked process for each of the given environments, which may be a launcher's.

    Args:
        arguments: Of the function.
        folder: The working directory.
        environments: The environment variables of each process.
        function: A function that a process can import; by default the command line.
    """

    def __init__(self, arguments, folder, environments, function=None):
        self.logs = [Path(folder) / f"rank{i}.log" for i in range(len(environments))]
        self.processes = [
            forked(function, arguments, folder, environment, log, log)
            for environment, log in zip(environments, self.logs, strict=True)
        ]

    def finish(self, seconds=120):
        """Return the exit statuses; if a process takes too long, kill it and fail the test."""
        for process in self.processes:
            process.join(seconds)
        alive = [i for i, process in enumerate(self.processes) if process.is_alive()]
        for i in alive:
            self.processes[i].kill()
        assert not alive, f"processes {alive} still ran after {seconds} s: {self.text()[-3000:]}"
        return [process.exitcode for process in self.processes]

    def text(self):
        """Return the output of all processes."""
        return "\n".join(log.read_text() for log in self.logs)


def forked(function, arguments, folder, environment, out, err):
    """Start a function, by default the command line, in a fork of a process that has imported all modules.

    A fork takes a tenth of the time of a new process. `out` and `err` are files, or a terminal.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["relvit.app.cli.fit.fit", "torch.utils.tensorboard", "tensorboard.backend"])
    given = [str(argument) for argument in arguments]
    process = context.Process(target=_run, args=(function, given, str(folder), environment, str(out), str(err)))
    process.start()
    return process


def _run(function, arguments, folder, environment, out, err):
    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    import relvit_start
    from relvit.app.training.run.processes import leave_processes

    os.setsid()
    for name, path in (("stdout", out), ("stderr", err)):
        # `out` and `err` may be the same file, which must stay open until the process ends.
        file = open(path, "a", buffering=1)  # noqa: SIM115
        os.dup2(file.fileno(), 1 if name == "stdout" else 2)
        setattr(sys, name, file)
    if sys.stdout.isatty():
        sys.stdin = open(out)  # noqa: SIM115
    # An earlier test in the forking process may have left the id of a main process, which is not the parent here.
    os.environ.pop(relvit_start.STARTER, None)
    os.environ.update(environment)
    os.chdir(folder)
    # Lightning has set this attribute when the forking process imported it.
    rank_zero_only.rank = int(environment.get("RANK", environment.get("SLURM_PROCID", 0)))
    torch.set_num_threads(1)
    # With a fork server the loader's workers would import all modules again.
    multiprocessing.set_start_method("fork", force=True)
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "support")]
    if function is None:
        # Lightning starts the processes of other devices by this command line, as if a user had typed it.
        sys.argv = [str(Path(sys.executable).with_name("relvit")), *arguments]
        sys.exit(relvit_start.main())
    function(*arguments)
    leave_processes()


def is_open(path):
    """Return whether this process has a file open."""
    return str(path) in [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
