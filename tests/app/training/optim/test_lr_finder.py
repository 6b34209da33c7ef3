"""The learning rate of a range test, for curves whose steepest fall is known, and in trainings on few images."""

import math

import numpy as np
import pytest
import torch
from small_training import Noise, assert_close, build, train

from relvit.app.training import FindLearningRate, NonFiniteLossError
from relvit.app.training.optim import lr_finder
from relvit.app.training.optim.lr_finder import steepest_fall

RATES = np.logspace(-7, 0, 100)


def falling(at, rates=RATES):
    """Return losses that fall from 2 to 1 within about a decade and a half, most steeply at a given rate."""
    return 1 + 1 / (1 + (rates / at) ** 1.5)


@pytest.mark.parametrize("at", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize(("noise", "explodes"), [(0.0, False), (0.1, False), (0.1, True)])
def test_steepest_fall_per_order_of_magnitude(at, noise, explodes):
    """The derivative of this curve by log(rate) is lowest where the rate is `at`."""
    for seed in range(5):
        losses = falling(at) + np.random.default_rng(seed).normal(0, noise, len(RATES))
        if explodes:
            losses[90:] = 10.0 ** np.arange(10)
            losses[95:97] = np.inf, np.nan
        assert at / 2 < steepest_fall(RATES, losses) < at * 2
        # The losses of several batches at one rate are averaged.
        twice = np.repeat(losses, 2) + np.tile([0.5, -0.5], len(RATES))
        assert steepest_fall(np.repeat(RATES, 2), twice) == pytest.approx(steepest_fall(RATES, losses), rel=0.1)


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


def test_the_rate_found_sets_the_whole_schedule_and_the_rest_is_as_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lr_finder, "STEPS", 40)
    module = build(lr=1e-3, min_lr=0.0, warmup_epochs=0, lr_base_batch=16, ema_decay=0.9, mixup=0.2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weights, rates, counts, finder = [], [], [], FindLearningRate()

    def record(*_):
        if module.range_test is None:
            weights.append({name: value.clone() for name, value in module.state_dict().items()})
            counts.append(int(module.train_metrics["train/loss"].weight))
            rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    module.on_before_zero_grad = record
    trainer = train(module, max_epochs=2, callbacks=[finder], default_root_dir=tmp_path)
    assert len(finder.rates) == len(finder.losses) > 20
    found = steepest_fall(finder.rates, finder.losses)
    # The batches have 4 images, and `lr` is the rate for 16 images.
    assert module.hparams.lr / 4 == pytest.approx(found)
    assert module.plan.lr == pytest.approx(found)
    assert module.plan.steps == trainer.global_step == 12
    assert f"learning rate found: {found:.3g}, as --model.lr {found * 4:.3g}" in capsys.readouterr().out
    assert rates == pytest.approx([found * (1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)])
    assert_close(weights[0], before)
    assert counts[:6] == [4, 8, 12, 16, 20, 23]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        (falling(0.01), "is not above --model.min_lr 0.8; the training keeps --model.lr 0.9"),
        (np.ones(100), "the loss fell nowhere"),
    ],
)
def test_the_configured_rate_is_kept_where_none_is_found(losses, why, capsys):
    """The test passes these losses to the callback, and no range test runs."""
    module, finder = build(lr=0.9, min_lr=0.8, warmup_epochs=0), FindLearningRate()
    finder.lr_find = lambda trainer, module: module.range_test.extend(zip(RATES, losses, strict=True))
    train(module, max_epochs=1, limit_train_batches=1, limit_val_batches=0, callbacks=[finder])
    assert why in capsys.readouterr().out
    assert (module.hparams.lr, module.plan.lr) == (0.9, 0.9)


def test_a_rate_is_found_where_none_is_configured():
    """The batches have 4 images, and `lr` is the rate for 16 images."""
    module, finder = build(lr=0.0, min_lr=0.0, warmup_epochs=0, lr_base_batch=16), FindLearningRate()
    finder.lr_find = lambda trainer, module: module.range_test.extend(zip(RATES, falling(0.01), strict=True))
    train(module, max_epochs=1, limit_train_batches=1, limit_val_batches=0, callbacks=[finder])
    assert module.plan.lr == pytest.approx(steepest_fall(RATES, falling(0.01)))
    assert module.hparams.lr == pytest.approx(4 * module.plan.lr)


def test_a_resumed_training_is_refused(tmp_path):
    """The states of optimiser and schedule in its checkpoint would replace the rate that was found."""
    train(build(warmup_epochs=0), max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="a resumed training keeps its learning rate: leave the callback out"):
        train(build(warmup_epochs=0), ckpt_path=tmp_path / "x.ckpt", max_epochs=2, callbacks=[FindLearningRate()])


def test_losses_of_the_search_that_are_not_finite_do_not_end_the_training(monkeypatch):
    monkeypatch.setattr(lr_finder, "STEPS", 8)
    module = build()
    loss = module.loss.forward
    module.loss.forward = lambda *given: loss(*given) * (1.0 if module.range_test is None else math.nan)
    trainer = train(module, max_epochs=1, limit_val_batches=0, callbacks=[FindLearningRate()])
    assert trainer.global_step == 6


def test_non_finite_losses_end_the_search_and_then_the_training(capsys, monkeypatch):
    monkeypatch.setattr(lr_finder, "STEPS", 8)
    module = build()
    with pytest.raises(NonFiniteLossError):
        train(module, Noise(spoilt=True), max_epochs=1, callbacks=[FindLearningRate()])
    assert "Warning: --lr_find" in capsys.readouterr().out
    assert module.range_test is None
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
