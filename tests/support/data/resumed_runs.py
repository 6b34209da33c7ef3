"""Functions for tests that resume runs: the files and the weights of a run."""

from relvit.app.training import RunLock, read_checkpoint

# Batches are half as large, and two are accumulated, so the optimiser steps are the same.
HALVED = ["--data.batch_size=4", "--trainer.accumulate_grad_batches=2"]


def files(folder):
    """Return the content of each file of a run except its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != RunLock.NAME}


def weights(folder):
    """Return the weights in a run's last checkpoint."""
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
