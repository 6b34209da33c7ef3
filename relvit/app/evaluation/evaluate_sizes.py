"""Evaluate trained classifiers at several image sizes, and squashed: accuracy, calibration, speed, work, memory."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from relvit.app.data import Fill, ImageData, SizeProtocol, parse_size
from relvit.app.data.at_size import at_size
from relvit.app.data.registry import named_data_module
from relvit.app.evaluation.costs import count_macs, peak_memory
from relvit.app.evaluation.standard_error import paired_difference, with_errors
from relvit.app.models import at_image_size, patch_size_of
from relvit.app.training import Checkpoint, ImageClassifier, classifier_of
from relvit.app.training.base_classifier import run_batches
from relvit.app.training.checkpoints.checkpoint import first_difference
from relvit.app.training.metrics import count_batch, epoch_metrics
from relvit.app.training.optim.loss import evaluation_loss
from relvit.app.utils.defaults import torch_defaults
from relvit.models import Reach, set_reach
from relvit.utils.messages import check_choice, listing

Size = int | tuple[int, int]
"""Image size in pixels: one number or (height, width)."""
Split = Literal["train", "val", "test"]
# `Progress` is a function that takes an iterable, its length and a description, and yields the items, such as
# `relvit.app.utils.progress.with_bar`.
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]

PROTOCOLS: dict[SizeProtocol, str] = {
    "resize": "the whole image squashed to each size, objects grow: what embeddings stretched over the image promise",
    "crop": "as timm: resized by crop_pct, then a centre crop; objects grow with the size",
    "field": "objects keep their scale, the model sees more or less of the image: what relative offsets promise",
}
"""A description of each protocol: how images get their size, and which kind of positions is made for this."""
# Checkpoints may differ in these arguments of data modules, and in all arguments of `ImageData`, and still be compared,
# because these arguments do not determine which images are used.
LOADING = ("on_error", "cache", "download")
# Users must not change these arguments of `ImageData`, which describe the shape of the training's images.
OF_THE_TRAINING = ("img_size", "train_sizes", "native", "max_tokens", "patch_size")


@torch_defaults()
def evaluate_sizes(
    ckpt_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    sizes: Sequence[Size],
    split: Split = "val",
    root: str | None = None,
    batch_size: int | None = None,
    accelerator: str = "auto",
    protocol: SizeProtocol = "crop",
    fill: Fill | None = None,
    progress: Progress | None = None,
    reach: Reach = "trained",
    squares: bool = False,
    data: str | None = None,
    data_args: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate checkpoints of `relvit fit` at each size, on the same images.

    A model that was trained on native shapes gets images of one size as well.

    Args:
        ckpt_path: a checkpoint, or several, of the same classes and images.
        sizes: image sizes in pixels, each one number or (height, width), multiples of the patch. A size that only some
            of the checkpoints can take is left out for the other checkpoints, with a warning.
        split: 'train' (without augmentation), 'val' or 'test'.
        root: the folder of the data; needed if it is no longer the folder that the checkpoints record.
        batch_size: images per batch; None: as in training.
        accelerator: Lightning's name of the device, such as 'cpu' or 'gpu'.
        protocol: how images get their size: 'crop', 'resize' or 'field', see `relvit.app.data.eval_transform`.
        fill: what 'field' shows beyond the image: 'reflect' (the default) or 'grey'.
        progress: function that is called with the batches of each evaluation and shows progress, see `Progress`.
        reach: how models treat sizes other than the size in training, see `relvit.models.set_reach`.
        squares: whether to evaluate each size that is not square a second time, on the same images squashed to the
            square with (nearly) the same number of patches, to show whether the images' shape helps.
        data: the name of the data module whose images are used, such as my_module.Mine. None: the data module of the
            training; if it is not part of relvit, it must have been imported already.
        data_args: arguments of the data module, such as a password; they replace the arguments that the checkpoint
            records. The shape of the images (`img_size`, `native` and the like) stays that of the training.

    Returns:
        A row for each checkpoint and size: 'checkpoint', 'model', 'reach', 'train_sizes' (each [height, width]; empty
        for native shapes) and the results of `evaluate_size`. Rows of every further checkpoint also have
        'acc1_difference', the difference to the first checkpoint, and its standard error 'acc1_difference_se' (see
        `paired_difference`). With `squares`, for sizes that are not square and images of one label, rows also have
        'square' (the side of the square in pixels), 'square_acc1', 'square_difference' (the accuracy at the size minus
        the accuracy at the square) and its standard error 'square_difference_se'.

    Raises:
        FileNotFoundError, ValueError: a checkpoint or a folder of images is missing or cannot be read.
        ValueError: `data`, `split`, `protocol`, `fill` or `reach` is unknown, or a model cannot have this reach.
        ValueError: the checkpoints have different classes or images, or the data have other classes than a checkpoint.
        ValueError: no checkpoint or no size is given, or one is given twice.
        ValueError: one of the sizes is a size that no checkpoint takes.
        ValueError: `data_args` has an argument of the shape of the training's images.
    """
    paths = [ckpt_path] if isinstance(ckpt_path, str | os.PathLike) else list(ckpt_path)
    check_each_once("checkpoint", paths)
    check_each_once("size", [parse_size(size, "sizes") for size in sizes])
    # The size of the training must stay as recorded, because `set_reach` and protocol 'field' compare each size with
    # it.
    if wrong := [name for name in data_args or {} if name in OF_THE_TRAINING]:
        raise ValueError(f"{wrong[0]} of the data is that of the training: leave it out, and give the sizes by `sizes`")
    data_type = named_data_module(data)
    checkpoints = [Checkpoint.read(path).with_data(data_type) for path in paths]
    pairs = []
    changes = {"root": root, "batch_size": batch_size, **(data_args or {})}
    for checkpoint in checkpoints:
        pairs.append((classifier_of(checkpoint), checkpoint.data_module(**changes)))
    for checkpoint, (_, images) in zip(checkpoints, pairs, strict=True):
        _check_same_images(checkpoints[0].path, pairs[0][1], checkpoint.path, images)
    for classifier, images in pairs:
        set_reach(classifier.net, reach, images.img_size)
    if root is not None and (note := pairs[0][1].part_note(split)):
        warnings.warn(note, stacklevel=3)
    todo = _possible(checkpoints, pairs, sizes, squares)
    device = Fabric(accelerator=accelerator, devices=1).device
    rows = []
    # `of_first` says for each size whether the first checkpoint classifies each image right. The results of other
    # checkpoints are compared with it.
    of_first: dict[Size, np.ndarray] = {}
    for checkpoint, (classifier, images), possible in zip(checkpoints, pairs, todo, strict=True):
        classifier.to(device)
        trained = [list(size) for size in images.train_sizes or [images.img_size]] if images.shape.fixed else []
        about = {"checkpoint": checkpoint.path, "model": classifier.hparams.model, "reach": reach}
        about |= {"train_sizes": trained}
        for size in possible:
            results, right = _evaluate(classifier, images, size, split, protocol, fill, progress)
            if checkpoint is checkpoints[0] and right is not None:
                of_first[size] = right
            elif right is not None and size in of_first and len(right) == len(of_first[size]):
                difference, error = paired_difference(of_first[size], right)
                results |= {"acc1_difference": difference, "acc1_difference_se": error}
            if squares and right is not None and (side := _square_of(classifier.net, size)):
                squashed, of_square = _evaluate(classifier, images, size, split, protocol, fill, progress, side)
                difference, error = paired_difference(of_square, right)
                results |= {"square": side, "square_acc1": squashed["acc1"]}
                results |= {"square_difference": difference, "square_difference_se": error}
            rows.append(about | results)
        classifier.cpu()
    return rows


@torch_defaults()
def evaluate_size(
    classifier: ImageClassifier,
    data: ImageData,
    size: Size,
    split: Split = "val",
    protocol: SizeProtocol = "crop",
    fill: Fill | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a classifier, on its device, at one image size.

    A timm model that accepts only one size is copied, and timm's `set_input_size` changes the copy: it interpolates
    position embeddings, as in timm's own evaluation. For arguments that are not listed here see `evaluate_sizes`.

    Args:
        classifier: the classifier; it is put into evaluation mode, and not changed otherwise.
        data: the data module of the training: its images, batches and normalisation are used, and its `img_size` is the
            size in training. Successive evaluations share its dataset.
        size: one number or (height, width), a multiple of the patch.

    Returns:
        'height', 'width', 'protocol' (and 'fill' if it is 'field'), 'split', 'images', 'acc1', 'acc5' (with five
        classes or more), 'acc1_se' and 'acc5_se' (their standard errors, see `accuracy_error`), 'loss' (mean
        cross-entropy), 'calibration_error' (see `calibration_error`), 'images_per_second' (of the forward pass alone,
        after a first pass that is not timed), 'macs' (multiply-accumulates of an image, see `count_macs`) and
        'peak_memory' (bytes for a batch, see `peak_memory`; None if it is not known). For a multi-label classifier
        'map' and 'f1' (with its thresholds) replace accuracies and calibration error.

    Raises:
        ValueError: `size` is neither a positive integer nor two of them, or is a size that the model does not take.
        ValueError: `split`, `protocol` or `fill` is unknown, or the data have no images of the split.
    """
    return _evaluate(classifier, data, size, split, protocol, fill, progress)[0]


def check_each_once(name: str, given: Sequence[Any]) -> None:
    """Raise ValueError if nothing is given, or something twice, whose rows could not be told apart."""
    if not given:
        raise ValueError(f"no {name} is given: give one or more")
    if twice := [one for one, count in Counter(given).items() if count > 1]:
        raise ValueError(f"{name} {twice[0]} is given more than once: give each once")


def _evaluate(
    classifier: ImageClassifier,
    data: ImageData,
    size: Size,
    split: Split,
    protocol: SizeProtocol,
    fill: Fill | None,
    progress: Progress | None,
    squash: int | None = None,
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the results of `evaluate_size`, and whether each image was right, see `Outcomes.right`."""
    check_choice("split", split, get_args(Split))
    own = at_size(data, size, split, protocol, fill, squash)
    loader = own.test_dataloader()
    height, width = own.img_size
    classifier = classifier.at_size(own.img_size)
    metrics, of = epoch_metrics(classifier.labels, own.num_classes), classifier.labels
    batches: list[np.ndarray] = []
    memory, seconds = [], []

    def timed_logits(images: Tensor) -> Tensor:
        images = images.to(classifier.device, next(classifier.net.parameters()).dtype)
        if not memory:
            memory.append(peak_memory(classifier.net, images))
        begin = _now(classifier.device)
        logits = classifier.logits(images)
        seconds.append(_now(classifier.device) - begin)
        return logits.float()

    what = f"{classifier.hparams.model} at {height} x {width}"
    loader = loader if progress is None else progress(loader, len(loader), what)
    for logits, labels in run_batches(timed_logits, loader, own, split):
        count_batch(metrics, evaluation_loss(logits, labels), logits, labels)
        batches.append(of.keep(of.probabilities(logits.double()), labels))
    tested = np.concatenate(batches, axis=1)
    images = tested.shape[1]
    accuracies = {name: float(value) for name, value in metrics.compute().items()}
    results = {
        "height": height,
        "width": width,
        "protocol": protocol,
        **({"fill": fill or "reflect"} if protocol == "field" else {}),
        "split": split,
        "images": images,
        **with_errors(accuracies, images),
        **of.calibration(tested),
        "images_per_second": images / sum(seconds),
        "macs": count_macs(classifier.net, own.img_size, own.in_chans),
        "peak_memory": memory[0],
    }
    return results, of.right(tested)


def _square_of(net: torch.nn.Module, size: Size) -> int | None:
    """Return the side in pixels of the square with about as many patches as `size`; None if `size` is a square."""
    height, width = parse_size(size)
    if height == width:
        return None
    patch = math.lcm(*patch_size_of(net))
    return patch * max(1, round(math.sqrt(height * width) / patch))


def _check_same_images(first: str, data: ImageData, other: str, other_data: ImageData) -> None:
    """Refuse data modules of different classes, or with different images."""
    if data.class_names != other_data.class_names:
        names = [listing(each.class_names) for each in (data, other_data)]
        raise ValueError(f"{first} has the classes {names[0]}, {other} {names[1]}: evaluate them apart")
    skipped = {*ImageData.argument_names(), *LOADING}
    chosen = [{"data": type(each).__name__} | each.recorded_args() for each in (data, other_data)]
    if difference := first_difference(*chosen, [name for name in chosen[0] | chosen[1] if name not in skipped]):
        name, ours, theirs = difference
        hint = "give the images of both by root (--root DIR)" if name == "root" else "evaluate them apart"
        raise ValueError(f"{first} was trained with {name} {ours}, {other} with {theirs}: {hint}")


def _possible(
    checkpoints: Sequence[Checkpoint],
    pairs: Sequence[tuple[ImageClassifier, ImageData]],
    sizes: Sequence[Size],
    squares: bool,
) -> list[list[Size]]:
    """List the sizes that each checkpoint takes, with their squares, before the first evaluation starts."""
    possible: list[list[Size]] = [[] for _ in pairs]
    for size in sizes:
        refusals = []
        for checkpoint, (classifier, data), taken in zip(checkpoints, pairs, possible, strict=True):
            try:
                side = _square_of(classifier.net, size) if squares else None
                for needed in (size, *([side] if side else [])):
                    at_image_size(classifier.net, parse_size(needed), data.in_chans, classifier.hparams.img_size)
                taken.append(size)
            except ValueError as error:
                refusals.append((checkpoint.path, error))
        if len(refusals) == len(pairs):
            raise refusals[0][1]
        for path, error in refusals:
            warnings.warn(f"{path} is left out at this size: {error}", stacklevel=4)
    return possible


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
