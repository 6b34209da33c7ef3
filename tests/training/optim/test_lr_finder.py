"""The learning rate of a range test, from curves whose steepest fall is known and from trainings on few images."""

import numpy as np
import pytest
from small_training import Noise, build, train

from relvit.training import FindLearningRate
from relvit.training.optim.gradients import NonFiniteLossError
from relvit.training.optim.lr_finder import steepest_fall

RATES = np.logspace(-7, 0, 100)


def falling(at, rates=RATES):
    """From 2 down to 1, steepest at a rate, over about a decade and a half."""
    return 1 + 1 / (1 + (rates / at) ** 1.5)


@pytest.mark.parametrize("at", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("explodes", [False, True])
def test_steepest_fall_per_order_of_magnitude(at, noise, explodes):
    """By its definition: for this curve the derivative by log(rate) is least where the rate is `at`."""
    for seed in range(20):
        losses = falling(at) + np.random.default_rng(seed).normal(0, noise, len(RATES))
        if explodes:
            losses[90:] = 10.0 ** np.arange(10)
            losses[95:97] = np.inf, np.nan
        assert at / 2 < steepest_fall(RATES, losses) < at * 2


def test_several_batches_at_a_rate_count_by_their_mean():
    rates = np.repeat(RATES, 2)
    losses = np.repeat(falling(1e-3), 2) + np.tile([0.5, -0.5], len(RATES))
    assert steepest_fall(rates, losses) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize(
    "losses",
    [
        np.ones(100),
        np.linspace(1, 2, 100),
        falling(1e-9),
        falling(1e3),
        np.full(100, np.nan),
        np.where(np.arange(100) < 9, falling(1e-3), np.nan),
    ],
    ids=["flat", "rising", "before the range", "behind the range", "not finite", "too few"],
)
def test_no_clear_fall(losses):
    assert steepest_fall(RATES, losses) is None


def test_noise_is_no_fall():
    found = [steepest_fall(RATES, np.random.default_rng(seed).normal(1, 0.1, 100)) for seed in range(50)]
    assert sum(rate is not None for rate in found) <= 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lr": 0.9, "min_lr": 0.8}, "is not above --model.min_lr 0.8; the training keeps --model.lr 0.9"),
        # Nothing is learnt.
        ({"lr": 0.9, "freeze_epochs": 2, "opt": "sgd", "opt_kwargs": {"maximize": True}}, "the loss fell nowhere"),
    ],
)
def test_the_configured_rate_is_kept_where_none_is_found(options, why, capsys):
    module = build(**options, warmup_epochs=0)
    train(module, max_epochs=1, callbacks=[FindLearningRate()])
    assert why in capsys.readouterr().out
    assert (module.hparams.lr, module.plan.lr) == (0.9, 0.9)


def test_non_finite_losses_end_the_search_and_then_the_training(capsys):
    module = build()
    with pytest.raises(NonFiniteLossError):
        train(module, Noise(spoilt=True), max_epochs=1, callbacks=[FindLearningRate()])
    assert "Warning: --lr_find" in capsys.readouterr().out
    assert module.range_test is None
    assert "training_step" not in vars(module)
