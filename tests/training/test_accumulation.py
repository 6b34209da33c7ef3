"""Accumulated batches against gradient steps that are worked out by hand."""

import pytest
import torch
from small_training import Noise, Record, build, train
from torch.utils.data import DataLoader, IterableDataset

OPTIONS = {"warmup_epochs": 0, "label_smoothing": 0.0, "lr": 0.1, "weight_decay": 0.0}
PLAIN_SGD = {"opt": "momentum", "opt_kwargs": {"momentum": 0.0}}


class Streamed(IterableDataset):
    """The images of `Noise`, one after the other, without a length."""

    def __iter__(self):
        data = Noise()
        return zip(data.images, data.labels, strict=True)


class NoLength(Noise):
    def train_dataloader(self):
        return DataLoader(Streamed(), batch_size=4)


# Six batches in an epoch, of which the last has three images.
@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"accumulate_grad_batches": 4}, [[0, 1, 2, 3], [4, 5]]),
        ({"accumulate_grad_batches": 4, "max_steps": 4}, [[0, 1, 2, 3], [4, 5]]),
        ({"accumulate_grad_batches": 4, "limit_train_batches": 5}, [[0, 1, 2, 3], [4]]),
        ({"accumulate_grad_batches": 8}, [[0, 1, 2, 3, 4, 5]]),
        ({"accumulate_grad_batches": 3}, [[0, 1, 2], [3, 4, 5]]),
    ],
)
@pytest.mark.parametrize("kind", [Noise, NoLength])
def test_each_step_takes_the_mean_of_the_batches_that_it_has(kind, options, windows):
    if kind is NoLength and "max_steps" not in options:
        options = options | {"max_steps": 2 * len(windows)}
    module = build(**OPTIONS, **PLAIN_SGD)
    record, data = Record(module), Noise()
    train(module, kind(), max_epochs=2, **options)
    net = build().net.train()
    assert len(record.weights) == 2 * len(windows)
    for indices, lr, weights in zip(2 * windows, record.rates, record.weights, strict=True):
        batches = [(data.images[4 * i : 4 * i + 4], data.labels[4 * i : 4 * i + 4]) for i in indices]
        losses = [torch.nn.functional.cross_entropy(net(images), labels) for images, labels in batches]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(net.parameters()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
                parameter -= lr * gradient
                torch.testing.assert_close(weights[name], parameter, atol=1e-6, rtol=1e-4)
                # The next step starts from the same weights.
                parameter.copy_(weights[name])


def test_the_norm_of_gradients_is_that_of_the_step():
    module = build(**OPTIONS, **PLAIN_SGD)
    record = Record(module)
    train(module, max_epochs=1, accumulate_grad_batches=8)
    before = dict(build().net.named_parameters())
    moved = torch.cat([(before[name].detach() - weights).flatten() for name, weights in record.weights[0].items()])
    assert float(module.step_metrics.compute()["train/grad_norm"]) == pytest.approx(float(moved.norm()) / 0.1, rel=1e-4)
