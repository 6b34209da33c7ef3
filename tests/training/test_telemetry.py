"""Speed and waiting time, by loaders and steps that take a known time."""

import time

import pytest
from small_training import Noise, build, train

from relvit.training import Telemetry


class Slow(Noise):
    """Each batch takes 20 ms to load."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        collate = loader.collate_fn

        def slow(items):
            time.sleep(0.02)
            return collate(items)

        loader.collate_fn = slow
        return loader


def test_waiting_and_speed():
    module, telemetry, found = build(), Telemetry(), []
    step = module.training_step

    def slow_step(batch, batch_idx):
        time.sleep(0.03)
        return step(batch, batch_idx)

    module.training_step = slow_step
    # Validation in the middle and at the end does not count.
    evaluate = module.validation_step
    module.validation_step = lambda *args: (time.sleep(0.1), evaluate(*args))
    module.on_train_epoch_end = lambda: found.append(telemetry.measured(module.trainer))
    options = {"callbacks": [telemetry], "enable_checkpointing": True}
    train(module, Slow(), max_epochs=2, val_check_interval=3, **options)
    assert len(found) == 2
    for epoch in found:
        total = 23 / epoch["system/images_per_second"]
        waited = epoch["system/data_wait"] * total
        # Six batches; a busy machine only adds.
        assert waited >= 0.12
        assert total - waited >= 0.18
        # Six validation steps of 0.1 s each come twice in an epoch.
        assert total < 1.2
        assert 0.05 < epoch["system/memory_gb"] < 100


def test_nothing_before_the_first_batch():
    trainer = train(build(), max_epochs=1, limit_train_batches=1)
    assert Telemetry().measured(trainer) == {}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_image_counts(accumulate):
    module, telemetry, found = build(), Telemetry(), []
    module.on_train_epoch_end = lambda: found.append(telemetry._images)
    train(module, max_epochs=2, callbacks=[telemetry], enable_checkpointing=True, accumulate_grad_batches=accumulate)
    assert found == [23, 23]
