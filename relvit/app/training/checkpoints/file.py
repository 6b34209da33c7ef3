"""Read, check and write checkpoint files (torch.load, CheckpointIO); check for free disk space before a training."""

from __future__ import annotations

import errno
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from lightning import Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from timm.models import split_model_name_tag
from torch import Tensor

from relvit.app.models.model_names import nearest_model
from relvit.app.training.checkpoints.tensors import check_finite, check_tensors
from relvit.app.training.checkpoints.upgrades import KEY, upgrade
from relvit.app.training.labels import are_thresholds
from relvit.app.utils.files import (
    atomic_write,
    has_links,
    is_address,
    is_exported,
    not_for_exported,
    parse_json,
    remove_parts,
)
from relvit.app.utils.nested_values import check_bounds
from relvit.app.utils.remote import local_file
from relvit.utils.messages import nearest

# A checkpoint holds the averaged weights under this key, with the same names as the raw weights, which are under
# 'state_dict'.
AVERAGE_KEY = "ema_state_dict"
# timm reads the weights under this key, if there are some, instead of 'state_dict'. Under this key the weights have the
# names that they have in the timm model, without the prefix 'net.' of `ImageClassifier`.
TIMM_KEY = "state_dict_ema"
# The name of a class has at most this number of characters. Longer names are refused, because tables of predictions
# repeat the names in each row and would grow huge.
LONGEST_NAME = 10_000
# If a user gives the folder of a run, `read_checkpoint` reads this file in the folder.
BEST = Path("checkpoints") / "best.ckpt"
# If a user gives a folder, an error message suggests the first of these checkpoints that the folder holds.
SUGGESTED = (BEST.name, "last.ckpt", "*.ckpt")
# This is the file name of the checkpoint of the last complete epoch, which is in the same folder as last.ckpt.
EPOCH_NAME = "epoch.ckpt"
# `HUB` and `FOLDER` are timm's prefixes for repositories of the Hugging Face hub and for folders; `FILES` are the
# suffixes of files that hold weights.
HUB, FOLDER = "hf-hub:", "local-dir:"
FILES = (".ckpt", ".safetensors", ".pth", ".pt", ".bin")

# Errors give this advice about ZIP archives that other programs than PyTorch have written.
UNPACK = "if a checkpoint was packed, unpack it and give the checkpoint, otherwise take another copy"


def read_checkpoint(path: str | os.PathLike[str], file: Path | None = None, averaged: bool = True) -> dict[str, Any]:
    """Read all content of a relvit checkpoint on the CPU; only tensors and plain types are read, never code.

    Most callers only need `relvit.app.training.Checkpoint`. 'state_dict' holds the averaged weights if the training
    kept an average (`ema_decay`).

    Args:
        path: The file; or the folder of a run, whose best checkpoint is read; or a remote address that fsspec supports,
            such as https://... or s3://... .
        file: A local copy of the remote file, if there already is one.
        averaged: False leaves the raw weights in 'state_dict', so that the content can be written again.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, not a checkpoint of relvit, or a checkpoint of a newer relvit; or the address
            cannot be read, see `local_file`.
        DownloadError: The file could not be fetched.
    """
    if file is None:
        with local_file(path) as file:
            return read_checkpoint(path, file, averaged)
    if file.is_dir() and (file / BEST).is_file():
        return read_checkpoint(Path(path) / BEST, file / BEST, averaged)
    if file.is_dir():
        published = is_published(file)
        instead = f"; timm.create_model('{FOLDER}{path}', pretrained=True) loads what is published" if published else ""
        patterns = (f"{place}{name}" for place in ("", "checkpoints/", "*/checkpoints/") for name in SUGGESTED)
        found = (each for pattern in patterns for each in sorted(file.glob(pattern), reverse=True) if each.is_file())
        if (such := next(found, None)) is None:
            raise FileNotFoundError(f"{path} is a folder without a .ckpt; give one, such as runs/RUN/{BEST}{instead}")
        raise FileNotFoundError(f"{path} is a folder; give the checkpoint, such as {such}{instead}")
    check_is_file(file)
    if not file.is_file():
        named = str(path).startswith((HUB, FOLDER)) or timm.is_model(split_model_name_tag(str(path))[0])
        hint = "" if named else nearest_hint(file)
        instead = f"; timm.create_model({str(path)!r}, pretrained=True) makes the model of this name" if named else ""
        raise FileNotFoundError(
            f"no checkpoint at {path}{hint}; give the file, such as runs/RUN/checkpoints/best.ckpt{instead}"
        )
    if is_exported(file):
        raise ValueError(not_for_exported(path))
    try:
        check_archive(file)
        # PyTorch warns of unusual tensors, such as quantised tensors. Ignore these warnings, because `check_tensors`
        # refuses such tensors.
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except ArchiveError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    # PyTorch raises errors of almost any type for broken files, such as TypeError, IndexError or AttributeError, so
    # catch all of them.
    except Exception as error:
        # A damaged file may make PyTorch seek an impossible position (EINVAL). Other system errors have other causes,
        # so raise them unchanged.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(
            f"{path} cannot be read: it is damaged, is not a checkpoint, or holds more than tensors and plain values, "
            "which relvit does not load; copy it again, or give a checkpoint that relvit fit wrote"
        ) from error
    if not isinstance(content, dict) or KEY not in content or "state_dict" not in content:
        raise ValueError(
            f"{path} is not a checkpoint of relvit fit or relvit.app.training.ImageClassifier, as it does not describe "
            "its model and data: give one of these (plain weights are for relvit fit --model.pretrained, in a file "
            "whose name ends in .pth)"
        )
    check_bounds(content[KEY], str(path))
    check_tensors(content, str(path))
    upgrade(content, str(path))
    if wrong := _wrong_part(content):
        raise ValueError(
            f"{path} is not a checkpoint of relvit fit: {wrong} is missing or has a wrong value; take another file"
        )
    for name in ("state_dict", AVERAGE_KEY):
        check_finite(content.get(name, {}), str(path))
    if averaged:
        content["state_dict"] = content["state_dict"] | content.get(AVERAGE_KEY, {})
    return content


def check_is_file(path: Path) -> None:
    """Refuse a pipe, a socket or a device, which may have no end; accept folders and paths that do not exist.

    Raises:
        ValueError: The path is a pipe, a socket or a device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} cannot be read: it is not a file but a pipe, a socket or a device")


class ArchiveError(ValueError):
    """A ZIP archive is damaged, or was not written by `torch.save`."""


def check_archive(path: Path) -> None:
    """Refuse a file of PyTorch (a ZIP archive) that is damaged or would take more memory than the file has bytes.

    `torch.save` never compresses entries, so a compressed entry is refused. The CRC of each entry is compared, unless
    the file was written without CRCs (`torch.serialization.set_crc32_options(False)`).

    Raises:
        ArchiveError: A CRC differs, or `torch.save` did not write the archive.
        zipfile.BadZipFile: The file is not an archive.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            if any("/code/" in entry.filename for entry in entries):
                raise ArchiveError("it has compressed entries, as TorchScript has; give a file of torch.save")
            raise ArchiveError(f"it has compressed entries, which torch.save never writes; {UNPACK}")
        if not any(entry.filename.endswith("/data.pkl") for entry in entries):
            raise ArchiveError(f"it is a ZIP archive without the entry data.pkl, which torch.save writes; {UNPACK}")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ArchiveError("the entries of its ZIP archive claim to be larger than the file; take another copy")
        if any(entry.CRC for entry in entries) and (damaged := archive.testzip()) is not None:
            raise ArchiveError(f"it is damaged, the checksum of {damaged} in it is wrong; take another copy")


def _wrong_part(content: dict[Any, Any]) -> str | None:
    """Return the name of the first part whose type is not the one that `relvit fit` writes, or None."""
    description = content[KEY]
    if not isinstance(description, dict):
        return repr(KEY)
    for name in ("model", "data"):
        if not _are_arguments(description.get(name)):
            return f"{KEY}.{name}"
    # The type of `schedule` is `str | Callable`, so the parser of `validate`, `test` and `predict` would import and
    # build a class that a mapping names here, and a checkpoint could run any code.
    if not isinstance(description["model"].get("schedule", ""), str):
        return f"{KEY}.model.schedule"
    if not isinstance(description["data"].get("class_path"), str):
        return f"{KEY}.data.class_path"
    if not _are_arguments(description["data"].get("init_args")):
        return f"{KEY}.data.init_args"
    if not _named(description.get("images") or {}):
        return f"{KEY}.images"
    parts = {"model": description["model"], "data": description["data"]["init_args"]}
    for part, names in ((part, values.get("class_names")) for part, values in parts.items()):
        if isinstance(names, list | tuple) and any(len(str(name)) > LONGEST_NAME for name in names):
            return f"{KEY}.{part}.class_names"
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


def _are_arguments(value: Any) -> bool:
    # The arguments become options of the command line, whose parser reads a dot in a name as a nested option, and fails
    # at other names that are not identifiers.
    return _named(value) and all(name.isidentifier() for name in value)


def timm_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights (averaged, if there is an average) with the names that they have in the model.

    If the result is added to the checkpoint, the file grows only by the names, because PyTorch writes the numbers of a
    tensor only once, even if the tensor occurs twice.
    """
    weights = checkpoint["state_dict"] | checkpoint.get(AVERAGE_KEY, {})
    return {name.removeprefix("net."): tensor for name, tensor in weights.items() if name.startswith("net.")}


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically: if writing is interrupted, `path` still holds the old file.

    Args:
        checkpoint: The content, which `torch.save` can write.
        path: The file, see `atomic_write`.

    Raises:
        OSError: The folder cannot be written to, or the disk is full.
    """
    # Open the file here, because PyTorch would raise its own error type instead of the system's OSError.
    with atomic_write(path) as part, open(part, "wb") as file:
        torch.save(checkpoint, file)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Plugin for Lightning (CheckpointIO) that replaces a file only when the new one is complete and on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            OSError: The folder cannot be written to, or the disk is full; the message names the last checkpoint.
        """
        # If a user's own callback saves a checkpoint, the path may be a remote address, to which Lightning can write:
        # let Lightning write.
        if is_address(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        try:
            write_checkpoint(checkpoint, path)
        except OSError as error:
            last = describe_last(path.parent)
            raise OSError(
                error.errno, f"cannot write the checkpoint {path}: {error.strerror or error}; {last}"
            ) from error


class DiskSpaceError(OSError):
    """The disk has no space for the checkpoints that a training will write."""


def describe_last(folder: Path) -> str:
    """Name the checkpoint of a folder that was written last, for an error message."""
    found = sorted(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    return f"the last complete checkpoint is {found[-1]}" if found else "there is no earlier checkpoint"


def check_disk_space(folder: Path, trainer: Trainer) -> None:
    """Refuse a disk without space for the checkpoints of a training, and remove incomplete files of killed processes.

    There must be space for best.ckpt, last.ckpt, and a new file, which replaces one of them when it is complete. On a
    disk without hard links, epoch.ckpt takes space, too. Checkpoints that exist already reduce the space that is
    needed, since new checkpoints replace them. The folder need not exist yet.

    Raises:
        DiskSpaceError: The space is too small.
    """
    module = trainer.lightning_module
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    # The average of the weights does not exist yet: Lightning calls `ImageClassifier.on_fit_start`, which makes it,
    # after this function. So add the space that the average is going to take.
    average = 0 if module.hparams.get("ema_decay") is None else weights
    trained = sum(p.nbytes for group in trainer.optimizers[0].param_groups for p in group["params"])
    # Estimate the optimiser's state by Adam's state, which has two numbers for each weight.
    size = weights + average + 2 * trained
    parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    if trainer.is_global_zero:
        remove_parts(folder)
    # Hard links to one file have the same inode and take its space once, so count different inodes.
    present = len({file.stat().st_ino for file in folder.glob("*.ckpt")}) if folder.is_dir() else 0
    copies = max(3 + (not has_links(parent)) - present, 1)
    free = shutil.disk_usage(parent).free
    if free < copies * size:
        raise DiskSpaceError(
            errno.ENOSPC,
            f"{free / 1e6:.1f} MB are free at {parent}, a checkpoint of this training takes about {size / 1e6:.1f} MB "
            f"and {copies} of them have to fit: make room, or give another folder (--runs)",
        )


def is_published(folder: Path) -> bool:
    """Return whether a folder has timm's config.json; the config.json of `transformers` has no 'architecture'."""
    try:
        found = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "architecture" in found


def nearest_hint(path: Path) -> str:
    """Return a hint at a file near the first missing part of a path, or at a model of timm."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    found = [*(missing.parent / "checkpoints").glob("[!.]*"), *missing.parent.glob("[!.]*")]
    near = {entry.name: entry for entry in found if entry.is_dir() or entry.suffix in FILES}
    if name := nearest(missing.name, near):
        return f" (did you mean '{near[name]}'?)"
    # The user may mean a model of timm: in names such as 'timm/MODEL' of the Hugging Face hub, the last part is a
    # model.
    architecture, tag = split_model_name_tag(path.name)
    name = nearest_model(architecture)
    known = f"{name}.{tag}" if name and timm.is_model_pretrained(f"{name}.{tag}") else name
    return f" (did you mean {known!r}?)" if known else ""
