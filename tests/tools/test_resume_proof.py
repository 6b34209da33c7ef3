"""Interrupted and resumed trainings in ten of the 78 ways of tools/resume_proof.py, with each pair of options."""

import itertools

import pytest
from scripts import load

PROOF = load("resume_proof")
# Each case has place, averaging, accumulation, signal and the options of the data.
CASES = [
    ("epoch end", False, 1, "SIGTERM", ""),
    ("validation", False, 1, "exception", ""),
    ("mid-epoch", False, 2, "SIGKILL", ""),
    ("mid-epoch", True, 1, "SIGTERM", ""),
    ("epoch end", True, 1, "SIGKILL", ""),
    ("epoch end", True, 2, "exception", "random sizes"),
    ("mid-epoch", True, 2, "SIGKILL", "progressive sizes"),
    ("validation", True, 2, "SIGKILL", "native shapes"),
    ("validation", True, 2, "SIGTERM", "halting"),
    ("mid-epoch", True, 2, "exception", "several labels"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return PROOF.make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def uninterrupted(images, tmp_path_factory):
    """Trainings without interruption, by averaging, accumulation and data, each of which is run once."""
    made = {}

    def find(*kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("uninterrupted") / "runs"
            made[kind], status = PROOF.train(images, folder, *kind)
            assert status == 0
        return made[kind]

    return find


def test_these_cases_cover_every_pair():
    assert len(PROOF.CASES) == 78
    assert set(CASES) <= set(PROOF.CASES)
    for a, b in itertools.combinations(range(4), 2):
        assert {(case[a], case[b]) for case in CASES} == {(case[a], case[b]) for case in PROOF.CASES}


# tests/app/training/test_stops.py has quicker tests that are not slow.
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_training_is_bit_equal_to_one_that_was_not_interrupted(case, images, uninterrupted, tmp_path):
    whole = uninterrupted(case[1], case[2], case[4])
    wrong, first, second = PROOF.try_out(tmp_path / "runs", images, whole, case)
    assert wrong == []
    assert 0 < second < PROOF.steps_of(whole) <= first + second


@pytest.mark.slow
def test_the_comparison_finds_what_differs(uninterrupted):
    assert PROOF.differences(uninterrupted(True, 1, ""), uninterrupted(True, 1, "")) == []
    different = PROOF.differences(uninterrupted(True, 1, ""), uninterrupted(False, 2, ""))
    assert {"last.ckpt: state_dict", "last.ckpt: ema_state_dict", "last.ckpt: global_step"} <= set(different)
    assert {"metrics.csv", "tensorboard"} <= set(different)
