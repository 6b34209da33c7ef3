import math

import pytest

from relvit.training import warmup_cosine


def test_closed_form():
    factors = [warmup_cosine(step, total=10, warmup=4, floor=0.1) for step in range(11)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    for step in range(4, 11):
        assert factors[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 6)) / 2)
    assert factors[10] == pytest.approx(0.1)


def test_without_warmup_and_with_a_single_step():
    assert warmup_cosine(0, total=5, warmup=0, floor=0.0) == 1.0
    assert warmup_cosine(0, total=1, warmup=0, floor=0.0) == 1.0
