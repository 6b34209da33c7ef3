"""Load, check and save the dictionary of a checkpoint file (CheckpointIO); `checkpoint.py` describes it."""

from __future__ import annotations

import errno
import math
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from relvit.data.modules.registry import public_class_path
from relvit.training.labels import are_thresholds
from relvit.utils.descriptions import check_bounds
from relvit.utils.files import atomic_write, has_links, is_address, remove_parts
from relvit.utils.remote import local_file

# The key of the description: model, data module, options and versions of the training.
KEY = "relvit"
# The key of the averaged weights, under the same names as the raw weights in 'state_dict'.
AVERAGE_KEY = "ema_state_dict"
# The key where timm looks before 'state_dict': the weights to use, under the model's own names.
TIMM_KEY = "state_dict_ema"
# In the folder of a run, which stands for it.
BEST = Path("checkpoints") / "best.ckpt"
# Beside last.ckpt: the checkpoint of the last complete epoch.
EPOCH_NAME = "epoch.ckpt"


def read_checkpoint(path: str | os.PathLike[str], file: Path | None = None, averaged: bool = True) -> dict[str, Any]:
    """Read all content of a relvit checkpoint, on the CPU. Only tensors and plain types are read, never code.

    `relvit.training.Checkpoint` has what most callers need. 'state_dict' holds the weights to use: the averaged ones
    where the training kept an average (`ema_decay`).

    Args:
        path: the file, the folder of a run, whose best checkpoint is read, or a remote address that fsspec knows, such
            as https://..., s3://... .
        file: the local copy of the address, if there is one already.
        averaged: False leaves the raw weights in 'state_dict', as they are stored, to write the content again.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a checkpoint, or not one of relvit's; an address that cannot be read here, see `local_file`.
        DownloadError: the file could not be fetched.
    """
    if file is None:
        with local_file(path) as file:
            return read_checkpoint(path, file, averaged)
    if file.is_dir() and (file / BEST).is_file():
        return read_checkpoint(Path(path) / BEST, file / BEST, averaged)
    if file.is_dir():
        raise FileNotFoundError(f"{path} is a folder; give the checkpoint, such as {file / BEST}")
    if not file.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}; give the file, such as runs/RUN/checkpoints/best.ckpt")
    try:
        check_archive(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except DamagedError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    # PyTorch raises almost any type for broken files: TypeError, IndexError, AttributeError, ...
    except Exception as error:
        # A damaged position in the file may be one that no file has; other errors of the system are its own.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(
            f"{path} cannot be read: it is damaged, no checkpoint, or holds more than tensors and plain values"
        ) from error
    if not isinstance(content, dict) or KEY not in content or "state_dict" not in content:
        raise ValueError(f"{path} is not a checkpoint of relvit fit: it does not say which model and data it is of")
    check_bounds(content[KEY], str(path))
    if wrong := _wrong_part(content):
        raise ValueError(f"{path} is not a checkpoint of relvit fit: {wrong} is not what it should be")
    for name in ("state_dict", AVERAGE_KEY):
        check_finite(content.get(name, {}), str(path))
    content[KEY]["data"]["class_path"] = public_class_path(content[KEY]["data"]["class_path"])
    if averaged:
        content["state_dict"] = content["state_dict"] | content.get(AVERAGE_KEY, {})
    return content


class DamagedError(ValueError):
    """The bytes of a file are not those that were written."""


def check_archive(path: Path) -> None:
    """Refuse an archive of PyTorch that is damaged, or would take more memory than the file has bytes.

    PyTorch stores, and never compresses. The CRC of each entry is compared; where the file was written without CRCs
    (`torch.serialization.set_crc32_options(False)`), there is nothing to compare.

    Raises:
        DamagedError: a CRC differs.
        ValueError: another kind of archive.
        zipfile.BadZipFile: no archive.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("a compressed entry")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("entries that are larger than the file")
        if any(entry.CRC for entry in entries) and (damaged := archive.testzip()) is not None:
            raise DamagedError(f"it is damaged, the checksum of {damaged} in it is wrong; take another copy")


def check_finite(weights: Mapping[str, Tensor], path: str) -> None:
    """Refuse weights that are infinite or not a number.

    Raises:
        ValueError: there is such a tensor; the message names the first one.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(
                f"{path} holds values in {name} that are infinite or not a number: take another checkpoint"
            )


def _wrong_part(content: dict[Any, Any]) -> str | None:
    """Return the name of the first part that has another type than `relvit fit` writes."""
    description = content[KEY]
    if not isinstance(description, dict):
        return repr(KEY)
    for name in ("model", "data"):
        if not _named(description.get(name)):
            return f"{KEY}.{name}"
    if not isinstance(description["data"].get("class_path"), str):
        return f"{KEY}.data.class_path"
    if not _named(description["data"].get("init_args")):
        return f"{KEY}.data.init_args"
    temperature = description.get("temperature", 1.0)
    if not (isinstance(temperature, float) and 0 < temperature < math.inf):
        return f"{KEY}.temperature"
    thresholds = description.get("thresholds")
    if thresholds is not None and not are_thresholds(thresholds, description["model"].get("num_classes")):
        return f"{KEY}.thresholds"
    for name in ("state_dict", AVERAGE_KEY):
        weights = content.get(name, {})
        if not _named(weights) or not all(isinstance(value, Tensor) for value in weights.values()):
            return repr(name)
    return None


def _named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def timm_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Select the weights to use, averaged where there is an average, and name them as the model itself does.

    The tensors are those that the checkpoint holds already, which PyTorch writes once: a file grows by the names.
    """
    weights = checkpoint["state_dict"] | checkpoint.get(AVERAGE_KEY, {})
    return {name.removeprefix("net."): tensor for name, tensor in weights.items() if name.startswith("net.")}


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically: whatever interrupts the writing, `path` holds the old file or the new one.

    Args:
        checkpoint: what `torch.save` can write.
        path: the file, in a folder that exists. A file that is there already is replaced.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    with atomic_write(path) as part:
        try:
            # Given a name, PyTorch would open the file itself and hide the system's error.
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:
            # PyTorch's error about an incomplete file hides the system's own about the disk.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin for checkpoint files, which replaces a file only by one that is complete and on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; at a remote address, which a user's callback may have, as Lightning does.

        Raises:
            OSError: the folder cannot be written to, or the disk is full; the message names the last checkpoint.
        """
        if is_address(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_checkpoint(checkpoint, path)
        except OSError as error:
            last = describe_last(path.parent)
            raise OSError(
                error.errno, f"cannot write the checkpoint {path}: {error.strerror or error}; {last}"
            ) from error


class DiskSpaceError(OSError):
    """The disk has no space for the checkpoints that a training is going to write."""


def describe_last(folder: Path) -> str:
    """Name the checkpoint of a folder that was written last, in words for an error message."""
    found = sorted(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    return f"the last complete checkpoint is {found[-1]}" if found else "there is no earlier checkpoint"


def check_disk_space(folder: Path, trainer: Trainer) -> None:
    """Refuse a disk without space for the checkpoints of a training, and remove what a killed process left of one.

    These are best.ckpt, last.ckpt and the copy that replaces one of them when it is complete; without hard links
    epoch.ckpt is a copy, too. The folder need not exist yet; checkpoints that are there already count.
    """
    module = trainer.lightning_module
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    # The average itself is made later in the same hook.
    average = 0 if module.hparams.get("ema_decay") is None else weights
    trained = sum(p.nbytes for group in trainer.optimizers[0].param_groups for p in group["params"])
    # Adam and similar optimisers keep two numbers for each weight.
    size = weights + average + 2 * trained
    parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    if trainer.is_global_zero:
        remove_parts(folder)
    # Names of one file, which hard links are, take its space once.
    present = len({file.stat().st_ino for file in folder.glob("*.ckpt")}) if folder.is_dir() else 0
    copies = max(3 + (not has_links(parent)) - present, 1)
    free = shutil.disk_usage(parent).free
    if free < copies * size:
        raise DiskSpaceError(
            errno.ENOSPC,
            f"{free / 1e6:.1f} MB are free at {parent}, a checkpoint of this training takes about {size / 1e6:.1f} MB "
            f"and {copies} of them have to fit: make room, or give another folder (--runs)",
        )
