"""Images per second and waiting time, measured by a clock that the test sets."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from small_training import build, train

from relvit.app.training import Telemetry


def batch(images):
    return torch.zeros(images, 3, 8, 12), torch.zeros(images)


def test_waiting_and_speed(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock, measure = Clock(), Telemetry()
    monkeypatch.setattr("relvit.app.training.callbacks.telemetry.time", clock)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), world_size=1)
    assert measure.measured(trainer) == {}
    measure.on_train_start(trainer, None)
    # A long validation comes before the second epoch, and must not count.
    for before in (0, 50):
        clock.now += before
        measure.on_train_epoch_start(trainer, None)
        for images in (4, 4, 3):
            clock.now += 1  # Loading a batch takes one second.
            measure.on_train_batch_start(trainer, None, batch(images), 0)
            clock.now += 3  # A training step takes three seconds.
            measure.on_train_batch_end(trainer, None, None, batch(images), 0)
        clock.now += 1000  # The validation takes a long time.
        measure.on_validation_end(trainer, None)
        found = measure.measured(trainer)
        assert found["system/images_per_second"] == pytest.approx(11 / 12)
        assert found["system/data_wait"] == pytest.approx(3 / 12)
        assert 0.05 < found["system/memory_gb"] < 100


def test_lightning_calls_it_for_every_image_and_after_those_that_save(monkeypatch):
    module, measure, found = build(), Telemetry(), []
    # Each reading of the clock is a second later than the last one, so six batches take twelve seconds.
    monkeypatch.setattr("relvit.app.training.callbacks.telemetry.time", SimpleNamespace(perf_counter=count().__next__))
    module.on_train_epoch_end = lambda: found.append(12 * measure.measured(module.trainer)["system/images_per_second"])
    options = {"callbacks": [measure], "enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer = train(module, max_epochs=2, **options)
    assert found == pytest.approx([23, 23])
    assert trainer.callbacks[-1] is measure
