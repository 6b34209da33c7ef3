"""Standard errors of accuracies, and of the difference between two models that classified the same images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def accuracy_error(accuracy: float, images: int) -> float:
    """Compute the standard error of an accuracy p on n images, the binomial distribution's sqrt(p (1 - p) / n).

    The standard error tells how much the accuracy may differ on other images of the same kind, but not how much the
    accuracy may differ after another training.
    """
    return math.sqrt(accuracy * (1 - accuracy) / images)


def paired_difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Compute the second model's accuracy minus the first model's accuracy, and the standard error of the difference.

    For each image let d be 1 if only the second model is right, -1 if only the first model is right, otherwise 0. The
    standard error is sqrt((mean(d^2) - mean(d)^2) / n); McNemar's test (1947) also uses only the images on which one
    model is right and one wrong. For models that mostly agree, this standard error is smaller than sqrt(e1^2 + e2^2),
    with the standard errors e1 and e2 of the two accuracies.

    Args:
        first: (n,) booleans, whether each image is right.
        second: whether each of the same images, in the same order, is right for the second model.

    Returns:
        The difference and its standard error.
    """
    difference = second.astype(np.float64) - first.astype(np.float64)
    return float(difference.mean()), float(np.sqrt(difference.var() / len(difference)))


def with_errors(results: Mapping[str, float], images: int) -> dict[str, float]:
    """Return results in which the standard error of each accuracy, `NAME_se`, follows the accuracy `NAME`.

    An accuracy is a result whose name ends in acc1, acc5, knn or linear. Mean average precision is not a share of
    images, so it has no such error. Without images there are no errors.
    """
    found: dict[str, float] = {}
    for name, value in results.items():
        found[name] = value
        if images and name.endswith(("acc1", "acc5", "knn", "linear")):
            found[f"{name}_se"] = accuracy_error(value, images)
    return found


def plus_minus(results: Mapping[str, Any], name: str, text: str = "{:.4f}") -> str:
    """Format a result by `text`, with its standard error if it has one, such as '0.8125 ± 0.0121'.

    A result that is NaN is null in a JSON file, and None after reading the file.
    """
    value, error = results[name], results.get(f"{name}_se")
    return text.format(math.nan if value is None else value) + ("" if error is None else f" ± {error:.4f}")
