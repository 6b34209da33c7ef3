"""Fit a temperature (Guo et al. 2017) or thresholds to held-out images; `class_metrics.py`: calibration error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.app.data import ImageData
from relvit.app.data.modules.base import Split
from relvit.app.data.registry import named_data_module
from relvit.app.training import Checkpoint, ImageClassifier, classifier_of
from relvit.app.training.base_classifier import run_batches
from relvit.app.training.checkpoints.file import read_checkpoint, write_checkpoint
from relvit.app.training.checkpoints.upgrades import KEY
from relvit.app.training.class_metrics import calibration_error
from relvit.app.training.labels import SeveralLabels
from relvit.app.utils.defaults import torch_defaults
from relvit.app.utils.files import check_output
from relvit.app.utils.remote import local_file
from relvit.app.utils.shown_text import counted


class CalibrationError(RuntimeError):
    """The temperature would make the probabilities of validation images worse."""


class Calibration(NamedTuple):
    """A temperature, with metrics on the images of the fit, each without and with the temperature.

    Attributes:
        temperature: the number by which logits are divided.
        images: number of images.
        accuracy: top-1 accuracy, which a temperature does not change.
        nll: mean negative log-likelihood of the classes, in nats.
        error: expected calibration error, see `relvit.app.evaluation.calibration_error`.
        next_split: the split on which `relvit test` can judge the temperature: test, or val if there is no test. If the
            data have no other split, it is the split on which the temperature was fitted.
    """

    temperature: float
    images: int
    accuracy: float
    nll: tuple[float, float]
    error: tuple[float, float]
    next_split: Split


class ChosenThresholds(NamedTuple):
    """Thresholds of a multi-label model, with the mean F1 of the classes on the images on which they were chosen.

    Attributes:
        thresholds: threshold of the best F1 of each class, see `relvit.app.training.multi_label_metrics`; a class
            without images keeps the threshold of the checkpoint.
        images: number of images.
        f1: mean F1 with the earlier thresholds, and with the new thresholds.
        next_split: as in `Calibration`.
    """

    thresholds: list[float]
    images: int
    f1: tuple[float, float]
    next_split: Split


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Find the temperature for which the logits divided by it have the lowest mean negative log-likelihood, in float64.

    Source: "On Calibration of Modern Neural Networks" (Guo et al. 2017, arXiv 1706.04599), section 4.2, eq. 9. L-BFGS
    searches the logarithm of the temperature. The log-likelihood is a concave function of the inverse temperature, so
    there is one optimum or none.

    Args:
        logits: (N, classes).
        labels: int64 (N,).

    Raises:
        ValueError: a logit is infinite or NaN.
        ValueError: in every image the label's logit is the largest, so that the likelihood grows for ever as the
            temperature falls.
        ValueError: the mean of the labels' logits is not above the mean of all logits, so that the likelihood grows for
            ever as the temperature rises.
    """
    logits = logits.detach().double()
    if not logits.isfinite().all():
        raise ValueError("some logits are infinite or not a number: take another checkpoint")
    of_label = logits.gather(1, labels[:, None])[:, 0]
    if (of_label == logits.amax(1)).all():
        raise ValueError(
            f"no wrong prediction for {counted(len(labels), 'image')}, so no temperature is best: use other images "
            "(another split or root), or leave the probabilities as they are"
        )
    if of_label.mean() <= logits.mean():
        raise ValueError(
            f"the logits of {counted(len(labels), 'image')} are no better than chance, so no temperature is best: take "
            "another checkpoint"
        )
    # Scale the logits to standard deviation 1. The search starts at temperature 1, which is then near the optimum.
    scale = logits.std()
    logits = logits / scale
    exponent = torch.zeros((), dtype=torch.float64, device=logits.device, requires_grad=True)
    tolerances = {"tolerance_grad": 1e-12, "tolerance_change": 1e-14}
    optimizer = torch.optim.LBFGS([exponent], max_iter=200, line_search_fn="strong_wolfe", **tolerances)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits * (-exponent).exp(), labels)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return float(scale * exponent.detach().exp())


@torch_defaults()
def calibrate(
    ckpt_path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    split: Literal["train", "val", "test"] = "val",
    root: str | None = None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
    data: str | None = None,
    data_args: Mapping[str, Any] | None = None,
) -> Calibration | ChosenThresholds:
    """Fit a temperature to a checkpoint, and write a copy of the checkpoint that differs only in the temperature.

    For a multi-label checkpoint the thresholds of the best F1 of each class are chosen instead.

    `relvit.load`, `relvit validate`, `test`, `predict`, `resolutions` and `export` divide logits by the temperature. A
    training that resumes or starts from the checkpoint ignores the temperature, because training changes the weights to
    which the temperature was fitted.

    Args:
        ckpt_path: a checkpoint of `relvit fit` or `relvit average`; its earlier temperature is ignored.
        output: the file to write, which ends in .ckpt and does not exist yet.
        split: images that the model was not trained on; 'train' is for comparison.
        root: the folder of the data; needed if it is no longer the folder that the checkpoint records.
        batch_size: images per batch; None: as in training.
        device: the device of the model.
        progress: a function that takes the batches and their number and yields the batches, for example to show a
            progress bar.
        data: the name of the data module whose images are used, such as my_module.Mine. None: the data module of the
            training; if it is not part of relvit, it must have been imported already.
        data_args: arguments of the data module, such as a password; they replace the arguments that the checkpoint
            records.

    Raises:
        FileNotFoundError: there is no file at `ckpt_path`, or no folder of images at `root` (None: where the checkpoint
            says).
        ValueError: `output` exists already, or does not end in .ckpt.
        ValueError: the file at `ckpt_path` is not a checkpoint of relvit, or `data` is not the name of a data module.
        ValueError: the data have other classes than the checkpoint, or an image cannot be read.
        ValueError: no temperature is the best one for these images, see `fit_temperature`.
        CalibrationError: the temperature was fitted to another split, and would raise the loss (the negative
            log-likelihood) on val; nothing is written.
    """
    check_output(output, (".ckpt",), replaces=False)
    with local_file(ckpt_path) as file:
        checkpoint = Checkpoint.read(ckpt_path, file)
        # Read the content before the evaluation: a training that still runs may replace the file in the meantime.
        content = read_checkpoint(ckpt_path, file, averaged=False)
        changes = {"root": root, "batch_size": batch_size, **(data_args or {})}
        images = checkpoint.with_data(named_data_module(data)).data_module(**changes)
        if root is not None and (note := images.part_note(split)):
            warnings.warn(note, stacklevel=3)
        classifier = classifier_of(checkpoint).to(device)
        classifier.temperature = 1.0
        images.prepare_data()
        others: list[Split] = [each for each in ("test", "val") if each != split and images.missing(each) is None]
        next_split = [*others, split][0]
        outcomes = _outcomes(classifier, images, split, progress)
        if classifier.thresholds is None:
            found = _evaluate(*outcomes, next_split)
            if "val" in others:
                _check_val(found, split, *_outcomes(classifier, images, "val", progress))
            change: dict[str, Any] = {"temperature": found.temperature}
        else:
            found = _choose(*outcomes, classifier.labels, next_split)
            change = {"thresholds": found.thresholds}
    content[KEY] |= change
    write_checkpoint(content, output)
    return found


def _outcomes(
    classifier: ImageClassifier,
    data: ImageData,
    split: Split,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None,
) -> tuple[Tensor, Tensor]:
    """Compute the logits float64 (N, classes) of the images of a split, and return them with the labels."""
    data.evaluate_on(split)
    loader = data.test_dataloader()
    loader = loader if progress is None else progress(loader, len(loader))
    found = run_batches(classifier.logits, loader, data, split)
    logits, labels = (torch.cat(part) for part in zip(*found, strict=True))
    return logits.double(), labels


def _check_val(found: Calibration, split: Split, logits: Tensor, labels: Tensor) -> None:
    before, after = (float(F.cross_entropy(logits / each, labels)) for each in (1, found.temperature))
    if not after <= before:
        raise CalibrationError(
            f"the temperature {found.temperature:.4f}, the best for the images of {split}, would raise the loss on the "
            f"{counted(len(labels), 'image')} of val from {before:.4f} to {after:.4f}: nothing is written; fit it to "
            "val (--split val)"
        )


def _choose(logits: Tensor, labels: Tensor, before: SeveralLabels, next_split: Split) -> ChosenThresholds:
    # Compute probabilities in float32, as a training does, so that both choose the same thresholds.
    kept = before.keep(before.probabilities(logits.float()), labels)
    after = before.fitted(kept)
    f1 = tuple(each.class_metrics(kept, logits.shape[1]).means()["f1"] for each in (before, after))
    return ChosenThresholds(after.thresholds, len(labels), f1, next_split)


def _evaluate(logits: Tensor, labels: Tensor, next_split: Split) -> Calibration:
    temperature = fit_temperature(logits, labels)
    scaled = (logits, logits / temperature)
    confidence = [each.softmax(-1).amax(-1).numpy() for each in scaled]
    right = (logits.argmax(-1) == labels).numpy()
    nll = tuple(float(F.cross_entropy(each, labels)) for each in scaled)
    error = tuple(calibration_error(each, right) for each in confidence)
    return Calibration(temperature, len(labels), float(right.mean()), nll, error, next_split)
