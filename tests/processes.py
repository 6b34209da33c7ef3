"""Runs of the command line in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# Lightning starts the second process itself.
BY_ITSELF = ["--trainer.devices=2", "--trainer.strategy=ddp"]


def start(arguments, folder, launcher=(), **environment):
    """A process that runs `relvit`, by itself or by a launcher (arguments of python), leading a group of its own."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "relvit", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"} | environment,
        start_new_session=True,
    )


def finish(process, seconds=120):
    """Exit status, standard output and standard error; a process that takes longer is killed, with its group."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s: {out[-2000:]} {err[-3000:]}") from None
    return process.returncode, out, err
