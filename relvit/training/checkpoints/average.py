"""Average the weights of several checkpoints into a new checkpoint (model soups)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from torch import Tensor

from relvit.training.checkpoints.checkpoint import NETWORK, Checkpoint, Transforms, first_difference, versions
from relvit.training.checkpoints.file import KEY, TIMM_KEY, timm_weights, write_checkpoint
from relvit.utils.files import check_output, is_address
from relvit.utils.messages import listing

FORMATS = (".ckpt",)


def average_checkpoints(ckpt_paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Write a checkpoint whose weights are the mean of several checkpoints' of `relvit fit`.

    Of one training they are its last epochs (Izmailov et al. 2018, arXiv 1803.05407), of several ones trainings that
    have the same start in common, such as the same pretrained weights (model soups, Wortsman et al. 2022, arXiv
    2203.05482); networks that were trained apart from the first step on have no useful mean.

    Of each checkpoint the weights count with which it is evaluated: its moving average where it has one. They are added
    up in float64; the mean has their own dtype. Buffers, such as indices, are no weights and must be the same in all.
    (Batch norm's statistics never are, so that models with batch norm are refused: the statistics of the mean would
    have to be taken anew, from images.)

    The new checkpoint can be used wherever one of `relvit fit` can, but for going on with its training, as it holds no
    state of an optimiser. Its data are those of the first.

    Args:
        ckpt_paths: two checkpoints or more, files or remote addresses, of the same model, classes and transforms.
        output: the file to write, which ends in .ckpt and does not exist yet.

    Raises:
        FileNotFoundError: no checkpoint there, or no folder to write to.
        ValueError: fewer than two, one of them twice, or not of a kind; weights that are not finite; an output that
            exists or ends otherwise.
    """
    check_average(ckpt_paths, output)
    first = Checkpoint.read(ckpt_paths[0])
    names = {name for name, _ in first.classifier().named_parameters(remove_duplicate=False)}
    total = {name: _in_double(first, name) for name in names}
    for path in ckpt_paths[1:]:
        other = Checkpoint.read(path)
        _check_same_kind(first, other)
        _check_same_tensors(first, other, names)
        for name in names:
            total[name] += _in_double(other, name)
    mean = {name: (value / len(ckpt_paths)).to(first.weights[name].dtype) for name, value in total.items()}
    checkpoint = {
        # In the order of the first.
        "state_dict": first.weights | mean,
        KEY: {
            # How each of them was trained does not apply to the mean.
            "model": {name: first.model[name] for name in NETWORK if name in first.model},
            "data": {"class_path": first.data_class, "init_args": first.data_args},
            "versions": versions(),
            "average_of": [str(path) for path in ckpt_paths],
        },
        # Without it Lightning takes the file for one of its earliest.
        "pytorch-lightning_version": lightning.__version__,
    }
    checkpoint[TIMM_KEY] = timm_weights(checkpoint)
    write_checkpoint(checkpoint, output)


def check_average(ckpt_paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """See, before anything is read, whether these can be files to average and to write.

    Raises:
        FileNotFoundError, ValueError: see `average_checkpoints`.
    """
    if len(ckpt_paths) < 2:
        raise ValueError(f"an average needs two checkpoints or more, got {len(ckpt_paths)}")
    seen: dict[str | Path, str | os.PathLike[str]] = {}
    for path in ckpt_paths:
        place = os.fspath(path) if is_address(path) else Path(path).resolve()
        if place in seen:
            also = "" if str(seen[place]) == str(path) else f", also as {seen[place]}"
            raise ValueError(f"{path} is given twice{also}: give each checkpoint once")
        seen[place] = path
    check_output(output, FORMATS)
    if Path(output).exists():
        raise ValueError(f"output {output} exists: give another name, or remove it first")


def _in_double(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.weights[name]
    if not tensor.isfinite().all():
        raise ValueError(f"{checkpoint.path} holds values in {name} that are infinite or not a number: leave it out")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64), copy=True)


def _check_same_kind(first: Checkpoint, other: Checkpoint) -> None:
    """Refuse another model, other classes, or other transforms of the images."""
    difference = first_difference(first.model, other.model, NETWORK) or first_difference(
        first.data_args, other.data_args, Transforms._fields
    )
    if difference:
        name, ours, theirs = difference
        raise ValueError(
            f"{other.path} was trained with {name} {theirs}, {first.path} with {ours}: "
            "only checkpoints of the same model, classes and transforms have a mean"
        )


def _check_same_tensors(first: Checkpoint, other: Checkpoint, parameters: set[str]) -> None:
    """Refuse other names, shapes and dtypes, and buffers that differ."""
    for one, rest in ((first, other), (other, first)):
        if only := [name for name in one.weights if name not in rest.weights]:
            raise ValueError(
                f"{other.path} and {first.path} do not hold the same tensors: only {one.path} has {listing(only, 2)}"
            )
    for name, tensor in first.weights.items():
        sides = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (other.weights[name], tensor)]
        if sides[0] != sides[1]:
            raise ValueError(f"{name} is {sides[0]} in {other.path}, {sides[1]} in {first.path}: they have no mean")
        if name not in parameters and not torch.equal(tensor, other.weights[name]):
            raise ValueError(
                f"{name} differs between {other.path} and {first.path} and is no weight but a buffer, which has no "
                "mean (batch norm's statistics would have to be taken anew, from images)"
            )
