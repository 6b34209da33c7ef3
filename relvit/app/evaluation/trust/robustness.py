"""Robustness sets: the classes that no test image has, to leave them out; accuracy by corruption and severity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from relvit.app.data import ImageData

# These are AlexNet's mean errors over the five severities of each corruption of ImageNet-C, from the authors' code
# (hendrycks/robustness).
ALEXNET = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
SEVERITIES = (1, 2, 3, 4, 5)


def absent_classes(data: ImageData) -> Tensor:
    """Return which classes no test image has, bool (num_classes,), for the attribute `absent` of `BaseClassifier`.

    With this attribute, a classifier chooses only among the classes of the test images. The authors of ImageNet-A and
    ImageNet-R evaluate in this way, since their sets have 200 of ImageNet's 1000 classes (Hendrycks et al. 2021, arXiv
    1907.07174 and 2006.16241).
    """
    absent = torch.ones(data.num_classes, dtype=torch.bool)
    absent[data.dataset("test").targets] = False
    return absent


class Corruptions(NamedTuple):
    """Accuracies of a test on corrupted images.

    Attributes:
        accuracy: for each corruption, the top-1 accuracy by severity.
        results: 'test/mean_corruption_error': the mean error over all corruptions, where the error of a corruption
            is one minus its mean accuracy over its severities. 'test/mce', only if all 15 corruptions of
            ImageNet-C, five severities and 1000 classes were tested: each error is divided by AlexNet's error on the
            same corruption, then the mean is taken (Hendrycks and Dietterich 2019, arXiv 1903.12261, section 4.1).
    """

    accuracy: dict[str, dict[int, float]]
    results: dict[str, float]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and rows of a table: accuracy of each corruption, and the mean, by severity."""
        severities = sorted({severity for found in self.accuracy.values() for severity in found})
        rows = []
        for name, found in [*self.accuracy.items(), ("mean", self._mean(severities))]:
            values = (f"{found[severity]:.4f}" if severity in found else "" for severity in severities)
            rows.append([name, *values, f"{np.mean(list(found.values())):.4f}"])
        # In the last row and column, write the mean of the corruptions' means: a mean of all cells would weigh each
        # corruption by the number of its severities.
        rows[-1][-1] = f"{1 - self.results['test/mean_corruption_error']:.4f}"
        return ["corruption", *map(str, severities), "mean"], rows

    def _mean(self, severities: Sequence[int]) -> dict[int, float]:
        of_severity = {s: [found[s] for found in self.accuracy.values() if s in found] for s in severities}
        return {severity: float(np.mean(values)) for severity, values in of_severity.items()}


def evaluate_corruptions(right: np.ndarray, conditions: Sequence[tuple[str, int]], classes: int) -> Corruptions:
    """Compute the accuracy of each corruption and severity.

    Args:
        right: whether each image was classified right, (N,).
        conditions: corruption and severity of each image.
        classes: the number of classes among the images.
    """
    outcomes: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for condition, outcome in zip(conditions, right, strict=True):
        outcomes[condition].append(outcome)
    accuracy: dict[str, dict[int, float]] = defaultdict(dict)
    for name, severity in sorted(outcomes):
        accuracy[name][severity] = float(np.mean(outcomes[name, severity]))
    errors = {name: 1 - float(np.mean(list(found.values()))) for name, found in accuracy.items()}
    results = {"test/mean_corruption_error": float(np.mean(list(errors.values())))}
    # Compare only the last part of a corruption's name, because its folder may be inside another folder, as in
    # noise/gaussian_noise.
    known = {Path(name).name: errors[name] for name, found in accuracy.items() if tuple(found) == SEVERITIES}
    if classes == 1000 and known.keys() >= ALEXNET.keys():
        results["test/mce"] = float(np.mean([known[name] / error for name, error in ALEXNET.items()]))
    return Corruptions(dict(accuracy), results)
