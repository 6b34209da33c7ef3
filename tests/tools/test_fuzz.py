"""Some hundreds of spoilt files; and that the tool would notice what it looks for."""

import shutil
from collections import Counter

import pytest
from fuzz_worker import work
from scripts import load

FUZZ = load("fuzz")


@pytest.mark.parametrize(("kind", "count"), [("images", 400), ("configs", 25), ("checkpoints", 60)])
def test_spoilt_files_are_accepted_or_refused(kind, count, run, tmp_path):
    shutil.copy(run / "checkpoints" / "last.ckpt", tmp_path / "valid.ckpt")
    valid, target, path = FUZZ.sources(kind, tmp_path), FUZZ.targets(kind), tmp_path / "case"
    for content in valid:
        path.write_bytes(content)
        assert FUZZ.attempt(target, path) == (FUZZ.ACCEPTED, "")
    found = Counter()
    for index in range(count):
        path.write_bytes(FUZZ.spoilt(kind, 7, index, valid))
        outcome, text = FUZZ.attempt(target, path)
        assert outcome in (FUZZ.ACCEPTED, FUZZ.REFUSED), f"--seed 7 --case {kind}:{index}\n{text}"
        found[outcome] += 1
    assert min(found[FUZZ.ACCEPTED], found[FUZZ.REFUSED]) > 0


def test_cases_follow_from_the_seed():
    for kind in ("images", "configs"):
        valid = FUZZ.sources(kind, None)
        first, again, other = ([FUZZ.spoilt(kind, seed, i, valid) for i in range(20)] for seed in (1, 1, 2))
        assert first == again
        assert first != other
        assert len(set(first)) > 15


def test_what_should_not_come_out_is_noticed(tmp_path):
    def fails(error):
        def target(path):
            raise error

        return FUZZ.attempt(target, tmp_path)[0]

    assert fails(ValueError("one line")) == FUZZ.REFUSED
    assert fails(ValueError("two\nlines")) == FUZZ.TRACEBACK
    assert fails(KeyError("x")) == FUZZ.TRACEBACK
    assert fails(MemoryError()) == FUZZ.TRACEBACK
    assert fails(RecursionError()) == FUZZ.TRACEBACK


def test_crashes_and_hangs_are_counted_and_the_rest_is_done(tmp_path):
    found = FUZZ.fuzz("images", 9, 0, 2, 0.5, tmp_path, work)
    assert found == {FUZZ.ACCEPTED: 7, FUZZ.CRASH: 1, FUZZ.HANG: 1}
