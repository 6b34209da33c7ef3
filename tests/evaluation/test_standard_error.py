"""Standard errors of accuracies against SciPy and repeated draws; where commands print and write them."""

import csv
import json
import re

import numpy as np
import pytest
import scipy.stats
from command_line import QUIET, only, summary, write_checkpoint_like

from relvit.cli import main
from relvit.evaluation import evaluate_sizes
from relvit.evaluation.standard_error import accuracy_error, paired_difference, plus_minus, with_errors


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
    # By McNemar's counts.
    gained, lost = (~first & second).sum(), (first & ~second).sum()
    assert error == pytest.approx(np.sqrt(gained + lost - (gained - lost) ** 2 / 400) / 400)
    # Repeated draws of as many images.
    draws = generator.integers(0, 400, (4000, 400))
    assert values[draws].mean(1).std() == pytest.approx(error, rel=0.05)
    assert paired_difference(first, first) == (0.0, 0.0)
    with pytest.raises(ValueError, match="the models were not given the same images: 400 and 3"):
        paired_difference(first, second[:3])


def test_results_with_errors():
    results = with_errors({"test/acc1": 0.5, "test/loss": 2.0, "test/map": 0.7}, 100)
    assert results == {"test/acc1": 0.5, "test/acc1_se": 0.05, "test/loss": 2.0, "test/map": 0.7}
    assert plus_minus(results, "test/acc1") == "0.5000 ± 0.0500"
    assert plus_minus(results, "test/map") == "0.7000"


@pytest.fixture(scope="module")
def two(best, tmp_path_factory):
    """Two checkpoints of the same images."""
    other = tmp_path_factory.mktemp("other") / "other.ckpt"
    kwargs = {"patch_size": 8, "embed_dim": 16, "depth": 1, "max_distance": 2}
    return best, write_checkpoint_like(best, other, "test_relvit", kwargs)


def test_sizes_of_two_checkpoints(two, tmp_path, capsys):
    rows = evaluate_sizes(two, [16, 24])
    for row in rows:
        assert row["acc1_se"] == pytest.approx(accuracy_error(row["acc1"], row["images"]))
    assert ["acc1_difference" in row for row in rows] == [False, False, True, True]
    for row, first in zip(rows[2:], rows[:2], strict=True):
        assert row["acc1_difference"] == pytest.approx(row["acc1"] - first["acc1"], abs=1e-6)
        assert 0 <= row["acc1_difference_se"] <= 1
    assert main(["resolutions", *map(str, two), "--sizes", "16", "24", "--output", str(tmp_path / "sizes")]) == 0
    assert "2 minus 1, on the same images at 24 x 24: " in capsys.readouterr().out
    written = json.loads((tmp_path / "sizes" / "resolutions.json").read_text())
    assert [row["acc1_se"] for row in written] == [row["acc1_se"] for row in rows]
    with open(tmp_path / "sizes" / "resolutions.csv", newline="") as file:
        assert [row["acc1_difference"] == "" for row in csv.DictReader(file)] == [True, True, False, False]
    assert (tmp_path / "sizes" / "resolutions.png").is_file()


def test_probes_of_two_models(two, photos, tmp_path, capsys):
    target = tmp_path / "probe.json"
    assert main(["probe", *map(str, two), "--root", str(photos), "--shares", "1", "--output", str(target)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d\.\d{4} ± \d\.\d{4} .*\d\.\d{4} ± \d\.\d{4}", out)
    assert re.search(r"2 minus 1, on the same images, share 1: 20-NN [+-]\d\.\d{4} ± \d\.\d{4}, linear ", out)
    first, second = json.loads(target.read_text())
    assert first["knn_se"] == pytest.approx(accuracy_error(first["knn"], first["images"]))
    assert second["linear_difference"] == pytest.approx(second["linear"] - first["linear"])


def test_a_test_and_a_training(run, best, photos, tmp_path, capsys):
    assert main(["test", str(best), f"--root={photos}", f"--runs={tmp_path}", *QUIET]) == 0
    assert re.search(r"images of test, accuracy \d\.\d{4} ± \d\.\d{4}, mean F1", capsys.readouterr().out)
    for found in (summary(only(tmp_path)), summary(run)):
        images = found.get("images", found.get("test/images"))
        assert found["test/acc1_se"] == pytest.approx(accuracy_error(found["test/acc1"], images))
