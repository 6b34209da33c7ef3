"""Speed and waiting time, by a clock that the test sets."""

import pytest
import torch
from small_training import build, train

from relvit.training import Telemetry


def batch(count):
    return torch.zeros(count, 3, 8, 12), torch.zeros(count)


def test_waiting_and_speed(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock, measure = Clock(), Telemetry()
    monkeypatch.setattr("relvit.training.callbacks.telemetry.time", clock)
    trainer = train(build(), max_epochs=1, limit_train_batches=1)
    assert measure.measured(trainer) == {}
    measure.on_train_start(trainer, None)
    # An epoch after a validation that took long.
    for before in (0, 50):
        clock.now += before
        measure.on_train_epoch_start(trainer, None)
        for count in (4, 4, 3):
            clock.now += 1  # to load
            measure.on_train_batch_start(trainer, None, batch(count), 0)
            clock.now += 3  # to train
            measure.on_train_batch_end(trainer, None, None, batch(count), 0)
        clock.now += 1000  # to validate
        measure.on_validation_end(trainer, None)
        found = measure.measured(trainer)
        assert found["system/images_per_second"] == pytest.approx(11 / 12)
        assert found["system/data_wait"] == pytest.approx(3 / 12)
        assert 0.05 < found["system/memory_gb"] < 100


def test_lightning_calls_it_for_every_image_and_after_those_that_save():
    module, measure, found = build(), Telemetry(), []
    module.on_train_epoch_end = lambda: found.append(measure._images)
    options = {"callbacks": [measure], "enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer = train(module, max_epochs=2, **options)
    assert found == [23, 23]
    assert trainer.callbacks[-1] is measure
