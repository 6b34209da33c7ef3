"""How a relvit checkpoint is read (tensors and plain values only, nothing in it is run) and written (whole or not)."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relvit.data.modules.registry import public_class_path
from relvit.utils.atomic_write import replacing
from relvit.utils.remote import local_file

# Where a checkpoint says which model and data it is of.
KEY = "relvit"
# Where it keeps the averaged weights, under the same names as the raw ones in 'state_dict'.
AVERAGE_KEY = "ema_state_dict"
# Where timm looks before 'state_dict': the weights to use, under the model's own names.
TIMM_KEY = "state_dict_ema"


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a relvit checkpoint, on the CPU. Only tensors and plain types are read, never code.

    'state_dict' holds the weights to use: the averaged ones where the training kept an average (`ema_decay`).

    Args:
        path: the file, or a remote address that fsspec knows, such as https://..., s3://... .

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a checkpoint, or not one of relvit's; an address that cannot be read here, see `local_file`.
        DownloadError: it could not be fetched.
    """
    with local_file(path) as file:
        return checkpoint_content(file, os.fspath(path))


def checkpoint_content(path: Path, name: str) -> dict[str, Any]:
    """The same of a file, which messages call by the name that the user gave."""
    if path.is_dir():
        raise FileNotFoundError(
            f"{name} is a folder; give the checkpoint, such as {path / 'checkpoints' / 'best.ckpt'}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {name}; give the file, such as runs/RUN/checkpoints/best.ckpt")
    try:
        _check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # PyTorch meets broken files with almost any type: TypeError, IndexError, AttributeError, ...
    except Exception as error:
        raise ValueError(
            f"{name} cannot be read: it is damaged, no checkpoint, or holds more than tensors and plain values"
        ) from error
    if not isinstance(content, dict) or KEY not in content or "state_dict" not in content:
        raise ValueError(f"{name} is not a checkpoint of relvit fit: it does not say which model and data it is of")
    if wrong := _wrong_part(content):
        raise ValueError(f"{name} is not a checkpoint of relvit fit: {wrong} is not what it should be")
    content[KEY]["data"]["class_path"] = public_class_path(content[KEY]["data"]["class_path"])
    content["state_dict"] = content["state_dict"] | content.get(AVERAGE_KEY, {})
    return content


def _check_archive(path: Path) -> None:
    """Refuse an archive that would take more memory than the file has bytes: PyTorch stores, and never compresses."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("a compressed entry")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("entries that are larger than the file")


def _wrong_part(content: dict[Any, Any]) -> str | None:
    """The first part of a checkpoint that has another type than `relvit fit` gives it, by its name."""
    remembered = content[KEY]
    if not isinstance(remembered, dict):
        return repr(KEY)
    for name in ("model", "data"):
        if not _named(remembered.get(name)):
            return f"{KEY}.{name}"
    if not isinstance(remembered["data"].get("class_path"), str):
        return f"{KEY}.data.class_path"
    if not _named(remembered["data"].get("init_args")):
        return f"{KEY}.data.init_args"
    for name in ("state_dict", AVERAGE_KEY):
        weights = content.get(name, {})
        if not _named(weights) or not all(isinstance(value, Tensor) for value in weights.values()):
            return repr(name)
    return None


def _named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def timm_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Select the weights to use, averaged where there is an average, and name them as the model itself does.

    They are the tensors that the checkpoint holds already, which PyTorch writes once: a file grows by their names.
    """
    weights = checkpoint["state_dict"] | checkpoint.get(AVERAGE_KEY, {})
    return {name.removeprefix("net."): tensor for name, tensor in weights.items() if name.startswith("net.")}


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint whole or not at all: whatever interrupts it, a file at `path` is the old one or the new one.

    Args:
        checkpoint: what `torch.save` can write.
        path: the file, in a folder that exists. One that is there already is replaced.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    with replacing(path) as part:
        try:
            # By name PyTorch would write it itself, and not say what the system has to complain of.
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:
            # PyTorch's complaint about the half of a file hides the system's own about the disk.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
