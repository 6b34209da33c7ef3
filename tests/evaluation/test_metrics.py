"""Metrics of classes against scikit-learn, the calibration error of all classes against torchmetrics."""

import numpy as np
import pytest
import sklearn.metrics
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from relvit.evaluation import calibration_error, class_metrics, confusion_matrix

CLASSES = 6


def test_classes():
    generator = np.random.default_rng(0)
    # Class 4 has no images, class 5 is never predicted, class 3 neither.
    labels, predicted = generator.choice([0, 1, 2, 5], 200), generator.choice([0, 1, 2, 4], 200)
    confusion = confusion_matrix(labels, predicted, CLASSES)
    np.testing.assert_array_equal(confusion, sklearn.metrics.confusion_matrix(labels, predicted, labels=range(CLASSES)))
    metrics = class_metrics(confusion)
    precision, recall, f1, count = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=range(CLASSES), zero_division=np.nan
    )
    np.testing.assert_array_equal(metrics.count, count)
    for found, expected in zip(metrics[1:], (precision, recall, f1), strict=True):
        np.testing.assert_allclose(found, expected)
    assert np.isnan([metrics.precision[5], metrics.recall[4], metrics.f1[3]]).all()


def test_calibration():
    probabilities = torch.randn(500, CLASSES, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    labels = torch.randint(0, CLASSES, (500,), generator=torch.Generator().manual_seed(1))
    confidence, predicted = probabilities.max(-1)
    expected = multiclass_calibration_error(probabilities, labels, CLASSES, n_bins=15, norm="l1")
    found = calibration_error(confidence.double().numpy(), (predicted == labels).numpy())
    assert found == pytest.approx(float(expected), rel=1e-5)
    # Always certain, right in three of four cases.
    assert calibration_error(np.ones(4), np.array([True, True, True, False])) == pytest.approx(0.25)
    # One bin, ]14/15, 1]: mean confidence 0.975, half of them right.
    assert calibration_error(np.array([1.0, 0.95]), np.array([False, True])) == pytest.approx(0.475)
