"""Runs that are trained further: their files and weights."""

from relvit.app.training import RunLock, read_checkpoint

# The same optimiser steps from batches of half the size.
HALVED = ["--data.batch_size=4", "--trainer.accumulate_grad_batches=2"]


def files(folder):
    """Return the content of each file of a run, without the lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != RunLock.NAME}


def weights(folder):
    """Return the weights of a run's last checkpoint."""
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
