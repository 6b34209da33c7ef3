"""Write `run.json`, which relvit reads only to add a session: command, seed, versions, devices and git commit."""

from __future__ import annotations

import json
import platform
import subprocess
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from relvit.app.utils.files import write_json
from relvit.app.utils.shown_text import one_line
from relvit.utils.messages import an
from relvit.version import __version__

PACKAGES = ("torchvision", "timm", "lightning", "torchmetrics", "numpy", "pillow")


def record_run(folder: Path, command: Sequence[str], seed: int | bool | None, trainer: Trainer) -> None:
    """Write `run.json`, or add a session to the file if a training is resumed.

    The file holds a list `sessions`. Each session has `started` (UTC), `command` (as typed, in which the caller has
    masked secrets), `seed`, `git` (see `git_state`, for the working folder), `versions`, `devices` and `deterministic`.
    """
    path = folder / "run.json"
    sessions = _read_sessions(path)
    device = trainer.strategy.root_device
    sessions.append(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(command),
            "seed": seed,
            "git": git_state(Path.cwd()),
            "versions": {"relvit": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
            | {name: version(name) for name in PACKAGES},
            "devices": {
                "count": trainer.world_size,
                "kind": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "precision": str(trainer.precision),
            },
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    )
    write_json(path, {"sessions": sessions})


def _read_sessions(path: Path) -> list[dict[str, Any]]:
    """Return the sessions of a run until now; rename the file if it is damaged, so that a new one begins."""
    if not path.is_file():
        return []
    try:
        sessions = json.loads(path.read_text())["sessions"]
        if not isinstance(sessions, list):
            raise TypeError(f"sessions is {an(type(sessions).__name__)}")
        return sessions
    except (ValueError, TypeError, KeyError) as error:
        kept = path.with_suffix(".damaged.json")
        path.replace(kept)
        message = f"{path} is damaged ({one_line(error)}): it is now {kept.name}, and a new one begins"
        warnings.warn(message, stacklevel=2)
        return []


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `commit` and `changed`, whether tracked files differ from it; None outside a repository or without git."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=10)
        return run.stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "changed": changed}
    except (OSError, subprocess.SubprocessError):
        return None
