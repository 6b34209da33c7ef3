"""Losses and gradients that are not finite: no optimiser step, on any device."""

import math

import pytest
import torch
from small_training import Noise, Record, build, train

from relvit.training import NonFiniteLossError

OPTIONS = {"warmup_epochs": 0, "ema_decay": 0.5}


def spoil_gradient(module, step):
    """Let the gradient of one parameter be infinite at a step, whatever the loss."""
    backward = module.on_after_backward

    def spoilt():
        backward()
        if module.global_step == step:
            module.net.head.bias.grad[0] = math.inf

    module.on_after_backward = spoilt


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    module = build(**OPTIONS)
    record = Record(module)
    spoil_gradient(module, 2)
    with pytest.raises(NonFiniteLossError, match=r"the gradient's norm is inf at step 3, in epoch 1: stopped"):
        train(module, max_epochs=1)
    assert len(record.weights) == 2
    for name, value in module.net.named_parameters():
        assert torch.equal(value, record.weights[-1][name])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipped_steps_leave_weights_and_are_counted(kind):
    module = build(**OPTIONS, nonfinite="skip")
    record = Record(module)
    if kind == "gradient":
        spoil_gradient(module, 2)
    counted = []
    module.on_train_epoch_end = lambda: counted.append(module.step_metrics.compute())
    trainer = train(module, Noise(spoilt=kind == "loss"), max_epochs=1, limit_val_batches=0)
    assert trainer.global_step == len(record.weights) == 6
    before, skipped, after = record.weights[1:4]
    assert all(torch.equal(skipped[name], before[name]) for name in before)
    assert not torch.equal(after["head.weight"], skipped["head.weight"])
    assert all(value.isfinite().all() for value in record.weights[-1].values())
    assert float(counted[0]["train/skipped_steps"]) == 1
    assert math.isfinite(counted[0]["train/grad_norm"])
    # The schedule goes on: it is one of steps, taken or not.
    assert record.rates[3] < record.rates[2] < record.rates[1]


def test_accumulated_losses_all_count():
    """Image 9 is in the third batch, the first of a pair, of which the second is fine."""
    module = build(**OPTIONS)
    record = Record(module)
    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 2, in epoch 1"):
        train(module, Noise(spoilt=True), max_epochs=1, accumulate_grad_batches=2)
    assert len(record.weights) == 1


def test_the_norm_is_that_of_all_gradients_before_clipping():
    module = build(**OPTIONS)
    norms = []
    clip = module.configure_gradient_clipping

    def look(*args, **kwargs):
        gradients = [p.grad.double().flatten() for p in module.net.parameters() if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        clip(*args, **kwargs)

    module.configure_gradient_clipping = look
    computed = []
    module.on_train_epoch_end = lambda: computed.append(float(module.step_metrics.compute()["train/grad_norm"]))
    train(module, max_epochs=1, gradient_clip_val=0.01)
    assert computed == [pytest.approx(sum(norms) / len(norms), rel=1e-5)]


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"nonfinite is 'skp'; allowed are 'stop', 'skip' \(did you mean 'skip'\?\)"):
        build(nonfinite="skp")
