"""Metrics of each class from a confusion matrix (NumPy), and the calibration error of probabilities."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ClassMetrics(NamedTuple):
    """Images of each class, int64 (C,), and float64 (C,) metrics that are NaN where they are undefined.

    `precision` is undefined where a class is never predicted, `recall` where it has no images, `f1` where both.
    """

    count: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Count images of each class (rows) by predicted class (columns): int64 (N,), int64 (N,) -> int64 (C, C)."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def class_metrics(confusion: np.ndarray) -> ClassMetrics:
    """Compute precision, recall and F1, 2 right / (images + predictions), of each class of a confusion matrix."""
    right, count, guesses = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    # torchmetrics has no value for what is undefined.
    with np.errstate(invalid="ignore"):
        return ClassMetrics(count, right / guesses, right / count, 2 * right / (count + guesses))


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Compute the expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3) in bins of equal width.

    Args:
        confidence: probability of the predicted class, (N,).
        right: whether that was the class, (N,).
        bins: number of bins.
    """
    # Bins ((m - 1) / bins, m / bins], as in the paper: torchmetrics gives a confidence of 1 a bin of its own.
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(place, right - confidence, bins)).sum() / len(confidence))
