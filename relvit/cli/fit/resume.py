"""`relvit fit --resume RUN`: go on in a run's folder, as it was configured, where its last checkpoint is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relvit.cli.errors import UsageError
from relvit.utils.remote import is_address


def resumed(run: str, arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The checkpoint to go on from, and the arguments of the whole command: the run's configuration, then those given.

    Args:
        run: the run's folder.
        arguments: what was given besides.

    Raises:
        UsageError: the folder is no run's, it has no checkpoint, or the arguments say where to begin as well.
    """
    if is_address(run):
        raise UsageError(f"--resume {run} is a remote address: a run goes on in a folder of this machine")
    folder = Path(run)
    for option in ("--config", "-c", "--ckpt_path", "--runs", "--model.model"):
        if any(argument == option or argument.startswith(f"{option}=") for argument in arguments):
            raise UsageError(f"--resume {folder} goes on with that run's own configuration: drop {option}")
    if not folder.is_dir():
        raise UsageError(f"no run at {folder}: give a folder that relvit fit has made, such as runs/RUN")
    config, checkpoints = folder / "config.yaml", folder / "checkpoints"
    if not config.is_file():
        raise UsageError(f"{folder} is no run of relvit fit: it has no config.yaml")
    last = checkpoints / "last.ckpt"
    if not last.is_file():
        others = sorted(checkpoints.glob("*.ckpt"))
        start = f"relvit fit --config {config}"
        hint = f"begin again with {start}"
        if others:
            hint = f"go on in a new folder with {start} --ckpt_path {others[0]}, or {hint}"
        raise UsageError(f"{folder} has no {last.relative_to(folder)} to go on from: {hint}")
    return last, [f"--config={config}", *arguments]
