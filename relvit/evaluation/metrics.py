"""What a confusion matrix says of each class, and how far probabilities can be trusted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ClassMetrics(NamedTuple):
    """Of each class, (C,): images of it, int64, and float64 values that are NaN where nothing defines them.

    `precision` is undefined where a class is never predicted, `recall` where it has no images, `f1` where both.
    """

    count: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Images of each class (rows) that were taken for each class (columns): int64 (N,), int64 (N,) -> int64 (C, C)."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def class_metrics(confusion: np.ndarray) -> ClassMetrics:
    """Precision, recall and F1, 2 right / (images + predictions), of each class of a confusion matrix (C, C)."""
    right, count, guesses = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    with np.errstate(invalid="ignore"):
        return ClassMetrics(count, right / guesses, right / count, 2 * right / (count + guesses))


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3): how far confidence is from accuracy.

    Args:
        confidence: probability of the predicted class, (N,).
        right: whether that was the class, (N,).
        bins: number of bins of equal width, each open below.

    Returns:
        The mean of |accuracy - mean confidence| of the bins, weighted by their images.
    """
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(place, right - confidence, bins)).sum() / len(confidence))
