"""How Lightning writes and reads checkpoints here: whole or not at all, and nothing but tensors and plain values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from relvit.training.checkpoints.disk import last_whole
from relvit.training.checkpoints.file import write_checkpoint
from relvit.utils.files import is_address


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that replace those of the same name only when they are complete and on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write. At a remote address, which a callback of the user's may have, Lightning does so itself.

        Raises:
            OSError: the folder cannot be written to, or the disk is full; the message names the last whole checkpoint.
        """
        if is_address(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_checkpoint(checkpoint, path)
        except OSError as error:
            kept = last_whole(path.parent)
            raise OSError(
                error.errno, f"cannot write the checkpoint {path}: {error.strerror or error}; {kept}"
            ) from error
