"""Accumulated batches compared with steps computed by hand; no step for losses and gradients that are not finite."""

import math
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from small_training import Noise, Record, assert_close, build, train
from torch.utils.data import DataLoader, IterableDataset

from relvit.app.training import ImageClassifier, NonFiniteLossError

PLAIN_SGD = {"opt": "momentum", "opt_kwargs": {"momentum": 0.0}, "label_smoothing": 0.0, "lr": 0.1, "weight_decay": 0.0}
OPTIONS = {"warmup_epochs": 0, "ema_decay": 0.5}


class Streamed(IterableDataset):
    """The images of `Noise`, one after the other, as a dataset without a length."""

    def __iter__(self):
        data = Noise()
        return zip(data.images, data.labels, strict=True)


class NoLength(Noise):
    def train_dataloader(self):
        return DataLoader(Streamed(), batch_size=4)


# An epoch has six batches, and the last batch has three images.
@pytest.mark.parametrize(
    ("data", "options", "windows"),
    [
        (Noise, {"accumulate_grad_batches": 4}, [[0, 1, 2, 3], [4, 5]]),
        (Noise, {"accumulate_grad_batches": 3}, [[0, 1, 2], [3, 4, 5]]),
        (NoLength, {"accumulate_grad_batches": 8, "max_steps": 2}, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_each_step_takes_the_mean_of_the_batches_that_it_has(data, options, windows):
    module = build(warmup_epochs=0, **PLAIN_SGD)
    record, noise = Record(module), Noise()
    train(module, data(), max_epochs=2, **options)
    net = build().net.train()
    assert len(record.weights) == 2 * len(windows)
    for indices, lr, norm, weights in zip(2 * windows, record.rates, record.norms, record.weights, strict=True):
        batches = [(noise.images[4 * i : 4 * i + 4], noise.labels[4 * i : 4 * i + 4]) for i in indices]
        losses = [torch.nn.functional.cross_entropy(net(images), labels) for images, labels in batches]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(net.parameters()))
        assert norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-4)
        with torch.no_grad():
            for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
                parameter -= lr * gradient
                torch.testing.assert_close(weights[name], parameter, atol=1e-6, rtol=1e-4)
                # Start the next step from the weights of the training, so that rounding errors do not add up.
                parameter.copy_(weights[name])


def spoil_gradient(module, step):
    """Make the gradient of one parameter infinite at a step, whatever the loss is."""

    def spoil():
        if module.global_step == step:
            module.net.head.bias.grad[0] = math.inf

    module.on_after_backward = spoil


@pytest.mark.parametrize(
    ("kind", "accumulate", "message"),
    [
        ("loss", 1, "the loss is nan at step 3, in epoch 1: stopped before the optimiser"),
        ("gradient", 1, "the gradient's norm is inf at step 3, in epoch 1: stopped before the optimiser"),
        # Batch 3 is the first of two accumulated batches; the loss of the second one is finite.
        ("loss", 2, "the loss is nan at step 2, in epoch 1"),
    ],
)
def test_what_is_not_finite_stops_before_the_step(kind, accumulate, message):
    """The third batch has image 9, which `Noise` spoils."""
    module = build(**OPTIONS)
    record = Record(module)
    if kind == "gradient":
        spoil_gradient(module, 2)
    with pytest.raises(NonFiniteLossError, match=message):
        train(module, Noise(spoilt=kind == "loss"), max_epochs=1, accumulate_grad_batches=accumulate)
    assert len(record.weights) == 2 // accumulate
    assert_close(dict(module.net.named_parameters()), record.weights[-1])
    assert record.weights[-1]["head.weight"].isfinite().all()


@pytest.mark.parametrize("kind", ["loss", "gradient", "gradient of float16"])
def test_skipped_steps_leave_weights_and_are_counted(kind):
    """With float16 the gradient scaler skips the step."""
    module = build(**OPTIONS, nonfinite="skip")
    record, options = Record(module), {}
    if kind != "loss":
        spoil_gradient(module, 2)
    if kind == "gradient of float16":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1.0))]
    counted = []
    module.on_train_epoch_end = lambda: counted.append(module.step_metrics.compute())
    trainer = train(module, Noise(spoilt=kind == "loss"), max_epochs=1, limit_val_batches=0, **options)
    assert trainer.global_step == len(record.weights) == 6
    before, skipped, after = record.weights[1:4]
    assert_close(skipped, before)
    assert not torch.equal(after["head.weight"], skipped["head.weight"])
    assert all(value.isfinite().all() for value in record.weights[-1].values())
    assert float(counted[0]["train/skipped_steps"]) == 1
    assert math.isfinite(counted[0]["train/grad_norm"])
    # The schedule also counts steps that are skipped.
    assert record.rates[3] < record.rates[2] < record.rates[1]


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_the_loss_of_a_skipped_step_does_not_count_in_the_epochs_mean(spoilt):
    module, losses, means = build(**OPTIONS, nonfinite="skip"), [], []
    loss = module.loss.forward

    def record(*given):
        found = loss(*given) * (spoilt if module.global_step == 2 else 1.0)
        losses.append((float(found.detach()), len(given[1])))
        return found

    module.loss.forward = record
    module.on_train_epoch_end = lambda: means.append(float(module.train_metrics.compute()["train/loss"]))
    train(module, max_epochs=1, limit_val_batches=0)
    del losses[2]
    expected = sum(value * images for value, images in losses) / sum(images for _, images in losses)
    assert means == [pytest.approx(expected)]


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_batch_that_is_not_finite_leaves_the_statistics_of_batch_norm(nonfinite):
    spoilt, clean = (
        ImageClassifier("test_resnet", 7, 3, (8, 12), lr=0.0, min_lr=0.0, nonfinite=nonfinite) for _ in range(2)
    )
    spoilt.net.load_state_dict(clean.net.state_dict())
    # The third batch holds the spoilt image.
    with pytest.raises(NonFiniteLossError) if nonfinite == "stop" else nullcontext():
        train(spoilt, Noise(spoilt=True), max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    train(clean, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    assert_close(dict(spoilt.net.named_buffers()), dict(clean.net.named_buffers()))


def test_the_epochs_norm_is_the_mean_of_its_steps_before_clipping():
    module = build(**OPTIONS)
    norms, computed = [], []

    def measure(*args, **kwargs):
        gradients = [p.grad.double().flatten() for p in module.net.parameters() if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        clip(*args, **kwargs)

    clip, module.configure_gradient_clipping = module.configure_gradient_clipping, measure
    module.on_train_epoch_end = lambda: computed.append(float(module.step_metrics.compute()["train/grad_norm"]))
    train(module, max_epochs=1, gradient_clip_val=0.01)
    assert computed == [pytest.approx(sum(norms) / len(norms), rel=1e-5)]


def test_gradients_are_clipped_over_all_accumulated_batches():
    module = build(warmup_epochs=0, **PLAIN_SGD)
    before = {name: parameter.detach().clone() for name, parameter in module.net.named_parameters()}
    record = Record(module)
    train(module, max_steps=1, accumulate_grad_batches=3, gradient_clip_val=0.05)
    squares = sum(float((record.weights[0][name] - value).square().sum()) for name, value in before.items())
    assert math.sqrt(squares) == pytest.approx(0.1 * 0.05, rel=1e-4)
