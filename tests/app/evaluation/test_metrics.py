"""Metrics of classes compared with scikit-learn, calibration errors with torchmetrics, standard errors with SciPy."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from small_training import build
from torchmetrics.functional.classification import multiclass_calibration_error

from relvit.app.evaluation import calibration_error, class_metrics, confusion_matrix
from relvit.app.evaluation.standard_error import accuracy_error, paired_difference, plus_minus, with_errors
from relvit.app.training import SeveralLabels
from relvit.app.training.labels import OneLabel

CLASSES = 6


def test_classes():
    generator = np.random.default_rng(0)
    # Class 4 has no images, and the classes 3 and 5 are never predicted.
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
    # All predictions are certain, and three of four are right.
    assert calibration_error(np.ones(4), np.array([True, True, True, False])) == pytest.approx(0.25)
    # One bin, ]14/15, 1], has both images: its mean confidence is 0.975, and half of its predictions are right.
    assert calibration_error(np.array([1.0, 0.95]), np.array([False, True])) == pytest.approx(0.475)


@pytest.mark.parametrize(("right", "images"), [(0, 5), (5, 5), (3, 7), (900, 1000), (1, 1)])
def test_the_error_of_an_accuracy_is_that_of_a_binomial_share(right, images):
    expected = scipy.stats.binom(images, right / images).std() / images
    assert accuracy_error(right / images, images) == pytest.approx(expected, abs=1e-12)


def test_the_paired_error_is_that_of_the_mean_of_differences():
    generator = np.random.default_rng(0)
    first = generator.random(400) < 0.6
    second = np.where(generator.random(400) < 0.9, first, ~first)
    difference, error = paired_difference(first, second)
    values = second.astype(int) - first.astype(int)
    assert difference == pytest.approx(second.mean() - first.mean())
    assert error == pytest.approx(scipy.stats.sem(values, ddof=0))
    # `gained` and `lost` are the counts of McNemar's test.
    gained, lost = (~first & second).sum(), (first & ~second).sum()
    assert error == pytest.approx(np.sqrt(gained + lost - (gained - lost) ** 2 / 400) / 400)
    # Each bootstrap sample has as many images as the test set.
    draws = generator.integers(0, 400, (4000, 400))
    assert values[draws].mean(1).std() == pytest.approx(error, rel=0.05)
    assert paired_difference(first, first) == (0.0, 0.0)


def test_results_with_errors():
    results = with_errors({"test/acc1": 0.5, "test/loss": 2.0, "test/map": 0.7}, 100)
    assert results == {"test/acc1": 0.5, "test/acc1_se": 0.05, "test/loss": 2.0, "test/map": 0.7}
    assert plus_minus(results, "test/acc1") == "0.5000 ± 0.0500"
    assert plus_minus(results, "test/map") == "0.7000"


@pytest.mark.parametrize("classes", [7, 100, 1000])
def test_of_equally_probable_classes_the_first_is_predicted_as_in_the_accuracy(classes):
    """Logits in bfloat16 are often equal; then predictions.csv names the class that the confusion matrix counts."""
    logits = torch.randn(500, classes, generator=torch.Generator().manual_seed(0)).bfloat16()
    probabilities, labels = OneLabel().probabilities(logits), OneLabel()
    counted = labels.keep(probabilities, logits.argmax(-1))
    assert labels.right(counted).all()
    names = [str(number) for number in range(classes)]
    for top in (None, 3):
        predicted = labels.predicted(probabilities, names, top)
        assert [int(row[0][0]) for row in predicted] == counted[1].tolist()
    even = torch.full((1, classes), 0.5)
    for of in (labels, SeveralLabels([0.5] * classes)):
        assert [name for name, _ in of.predicted(even, names, top=5)[0]] == names[:5]


def test_the_mean_with_the_mirror_image_is_one_of_the_probabilities_among_the_classes_that_are_present():
    classifier = build().eval()
    images = torch.randn(6, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    absent = torch.tensor([0, 1, 0, 0, 1, 1, 0]).bool()
    with torch.no_grad():
        # Larger weights make the probabilities of an image and its mirror image differ.
        classifier.net.head.weight.normal_(0, 30)
        views = [classifier(view)[:, ~absent].softmax(-1) for view in (images, images.flip(-1))]
        classifier.absent = absent
        found = classifier.probabilities(images, mirror=True)
    assert (views[0] - views[1]).abs().max() > 0.1
    assert (found[:, absent] == 0).all()
    torch.testing.assert_close(found[:, ~absent], (views[0] + views[1]) / 2)
