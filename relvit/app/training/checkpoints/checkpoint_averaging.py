"""Average the weights of several checkpoints into a new checkpoint (model soups)."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from torch import Tensor

from relvit.app.training.checkpoints.checkpoint import NETWORK, Checkpoint, Transforms, first_difference, versions
from relvit.app.training.checkpoints.file import TIMM_KEY, timm_weights, write_checkpoint
from relvit.app.training.checkpoints.load import classifier_of
from relvit.app.training.checkpoints.upgrades import FORMAT, KEY
from relvit.app.utils.files import check_output, is_address
from relvit.utils.messages import listing


def average_checkpoints(ckpt_paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Write a checkpoint whose weights are the mean of the weights of several checkpoints of `relvit fit`.

    The checkpoints may be the last epochs of one training (Izmailov et al. 2018, arXiv 1803.05407), or several
    trainings from the same start, such as the same pretrained weights (model soups, Wortsman et al. 2022, arXiv
    2203.05482). The mean of networks that started from different weights is useless.

    If a checkpoint has averaged weights (`ema_decay`), the function uses the averaged weights. Sums are computed in
    float64, and the mean has the dtype of the weights. Buffers must be the same in all checkpoints. Models with batch
    norm are refused, because the statistics of batch norm would have to be computed again from images.

    The new checkpoint holds no optimiser state, so no training can resume from it. The new checkpoint describes the
    data as the first checkpoint does. If all checkpoints of multi-label classifiers have the same thresholds, the new
    checkpoint keeps these thresholds; otherwise its thresholds are 0.5, and a warning says so. A temperature of `relvit
    calibrate` belongs to the logits of one checkpoint, so the new checkpoint has none, and a warning says so.
    If two checkpoints hold the same weights, a warning says that these count twice.

    Args:
        ckpt_paths: Two checkpoints or more, files or remote addresses, of the same model, classes and transforms.
        output: The file to write, which ends in .ckpt and does not exist yet.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        NotADirectoryError: A part of the output's path is a file.
        ValueError: There are fewer than two checkpoints, or a checkpoint is given twice.
        ValueError: The models, classes, transforms or buffers differ, or a checkpoint has weights that are not finite.
        ValueError: `output` exists already, or does not end in .ckpt.
    """
    _check_paths(ckpt_paths, output)
    first = Checkpoint.read(ckpt_paths[0])
    classifier = classifier_of(first)
    parameters = {name for name, _ in classifier.named_parameters(remove_duplicate=False)}
    total = {name: _in_double(first, name) for name in parameters}
    thresholds, calibrated = [first.thresholds], first.temperature != 1
    sources = {str(ckpt_paths[0]): first.sources}
    seen = {_digest(first): ckpt_paths[0]}
    for path in ckpt_paths[1:]:
        other = Checkpoint.read(path)
        thresholds.append(other.thresholds)
        sources[str(path)] = other.sources
        calibrated |= other.temperature != 1
        _check_same_kind(first, other, parameters)
        if (same := seen.setdefault(_digest(other), path)) is not path:
            warnings.warn(
                f"{path} and {same} hold the same weights, as best.ckpt, last.ckpt and epoch.ckpt of a run may, which "
                "count twice in the mean: leave one of them out",
                stacklevel=1,
            )
        for name in parameters:
            total[name] += _in_double(other, name)
    mean = {name: (value / len(ckpt_paths)).to(first.weights[name].dtype) for name, value in total.items()}
    checkpoint = {
        "state_dict": first.weights | mean,
        KEY: {
            # Keep only the arguments of the network, since other options may differ between the checkpoints.
            "model": {name: first.model[name] for name in NETWORK if name in first.model},
            "data": first.data,
            "images": first.images,
            "format": FORMAT,
            "versions": versions(),
            "average_of": sources,
        },
        # Lightning raises a KeyError if a checkpoint lacks this entry, so write it.
        "pytorch-lightning_version": lightning.__version__,
    }
    if all(each == first.thresholds for each in thresholds):
        checkpoint[KEY] |= classifier.labels.record()
    else:
        warnings.warn(
            f"the checkpoints have different thresholds: in {output} the threshold of every class is 0.5; to choose "
            f"thresholds anew: relvit calibrate {output}",
            stacklevel=1,
        )
    if calibrated:
        warnings.warn(
            f"a temperature holds for the logits of one checkpoint, so {output} has none; to fit its own: "
            f"relvit calibrate {output}",
            stacklevel=1,
        )
    checkpoint[TIMM_KEY] = timm_weights(checkpoint)
    write_checkpoint(checkpoint, output)


def _check_paths(ckpt_paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    if len(ckpt_paths) < 2:
        raise ValueError(f"an average needs two checkpoints or more, got {len(ckpt_paths)}")
    seen: dict[str | Path, str | os.PathLike[str]] = {}
    for path in ckpt_paths:
        resolved = os.fspath(path) if is_address(path) else Path(path).resolve()
        if resolved in seen:
            also = "" if str(seen[resolved]) == str(path) else f", also as {seen[resolved]}"
            raise ValueError(f"{path} is given twice{also}: give each checkpoint once")
        seen[resolved] = path
    check_output(output, (".ckpt",), replaces=False)


def _digest(checkpoint: Checkpoint) -> str:
    """Compute a digest of all weights, since checkpoints with the same weights may differ in all else."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint.weights):
        digest.update(checkpoint.weights[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _in_double(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.weights[name]
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64), copy=True)


def _check_same_kind(first: Checkpoint, other: Checkpoint, parameters: set[str]) -> None:
    """Refuse checkpoints of other models, classes, transforms or buffers, or with other names, shapes or dtypes."""
    difference = first_difference(first.model, other.model, NETWORK) or first_difference(
        first.images_args, other.images_args, Transforms._fields
    )
    # If only one of the trainings used native shapes, the sizes may still be equal, so also compare the kinds of
    # shapes.
    ours, theirs = ({"images": each.shape().words()} for each in (first, other))
    difference = difference or first_difference(ours, theirs, ours)
    if difference:
        name, ours, theirs = difference
        raise ValueError(
            f"{other.path} was trained with {name} {theirs}, {first.path} with {ours}: "
            "checkpoints of different models, classes or transforms cannot be averaged: leave one of them out"
        )
    for one, rest in ((first, other), (other, first)):
        if only := [name for name in one.weights if name not in rest.weights]:
            raise ValueError(
                f"{other.path} and {first.path} do not hold the same tensors, only {one.path} has {listing(only, 2)}: "
                "average checkpoints of one model"
            )
    for name, tensor in first.weights.items():
        theirs = other.weights[name]
        if (tensor.dtype, tensor.shape) != (theirs.dtype, theirs.shape):
            raise ValueError(
                f"{name} is {theirs.dtype} {tuple(theirs.shape)} in {other.path}, {tensor.dtype} {tuple(tensor.shape)} "
                f"in {first.path}: average checkpoints of one model"
            )
        if name not in parameters and not torch.equal(tensor, theirs):
            raise ValueError(
                f"{name} is a buffer, such as batch norm's statistics, and differs between {other.path} and "
                f"{first.path}: buffers cannot be averaged, so leave one of these checkpoints out"
            )
