"""Where a training is, such that it goes on exactly there.

Lightning stores the counters of its loops as they stand when a checkpoint happens to be written, in the middle of a
hook, and guesses from them what was done. Here a checkpoint says it outright, in terms of the last optimiser step, to
which weights, averages and optimiser belong; the counters are set by that before Lightning reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning import Trainer

from relvit.data.loading.train_sampler import training_position
from relvit.training.lightning_internals import resume_before_validation, validation_due
from relvit.training.optim.schedule import batch_size_of

# Where a checkpoint keeps it.
POSITION_KEY = "position"


class Position(NamedTuple):
    """A place between two optimiser steps.

    Attributes:
        epoch: the epoch that is under way or about to begin.
        batch: batches of it that are done, on each device.
        layout: how an epoch is divided: batches on each device, images in a batch, batches in an optimiser step, and
            devices.
        validated: whether the validation that is due here has been done.
    """

    epoch: int
    batch: int
    layout: list[int]
    validated: bool

    @classmethod
    def of(cls, trainer: Trainer, validated_at: tuple[int, int] | None, ended_epoch: int | None) -> Position:
        """That of a training, last validated at some epoch and batch, whose last complete epoch is known."""
        place = epoch, batch = training_position(trainer)
        if batch == 0 and epoch > 0 and ended_epoch != epoch - 1:
            # All batches are done, but what follows them is not.
            place = epoch - 1, trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return cls(*place, _layout(trainer), place == validated_at)

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> Position | None:
        """That of a checkpoint; None if it does not say."""
        stored = checkpoint.get(POSITION_KEY)
        return None if stored is None else cls(**stored)


def set_counters(checkpoint: dict[str, Any], position: Position) -> None:
    """Set the counters of a checkpoint's training loop to a position, as if everything before it were complete."""
    loop = checkpoint["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    under_way = position.batch > 0
    epochs = loop["epoch_progress"]
    for counter in (epochs["total"], epochs["current"]):
        counter["ready"] = counter["started"] = position.epoch + under_way
        counter["processed"] = counter["completed"] = position.epoch
    # Batches that were only accumulated are done once more.
    again = batches["current"]["processed"] - position.batch if under_way else 0
    _complete(batches["total"], batches["total"]["processed"] - again)
    _complete(batches["current"], position.batch)
    batches["is_last_batch"] = False
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (steps["step"], steps["zero_grad"], loop["epoch_loop.scheduler_progress"]):
        for counter in (progress["total"], progress["current"]):
            _complete(counter, counter["completed"])
    validation = loop["epoch_loop.val_loop.batch_progress"]
    for counter in (validation["total"], validation["current"]):
        _complete(counter, 0)
    validation["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps["step"]["total"]["completed"]


def go_on(trainer: Trainer, position: Position) -> None:
    """Tell a trainer, whose loops have those counters and are about to run, what comes next."""
    loop = trainer.fit_loop.epoch_loop
    # Early stopping has decided, but the decision itself is in no checkpoint.
    if any(callback.wait_count >= callback.patience for callback in trainer.early_stopping_callbacks):
        trainer.should_stop = True
    if position.batch == 0:
        # A new epoch like any other.
        loop.restarting = False
        return
    loop.batch_progress.is_last_batch = position.batch >= trainer.num_training_batches
    if validation_due(trainer):
        resume_before_validation(trainer, skip=position.validated)


def check_layout(trainer: Trainer, position: Position) -> None:
    """Refuse to go on with other steps than before.

    Within an epoch all of its layout has to stay. At an epoch's end batch size, accumulation and devices may change,
    but neither the images in an optimiser step, by which the learning rate is chosen, nor the steps in an epoch, by
    which the schedule knows where it is.

    Raises:
        ValueError: see above.
    """
    then, now = position.layout, _layout(trainer)
    if then == now or (position.batch == 0 and _steps(then) == _steps(now)):
        return
    if position.batch == 0:
        (steps, images), (steps_now, images_now) = _steps(then), _steps(now)
        raise ValueError(
            f"the checkpoint is from a training of {steps} optimiser steps in an epoch, of {images} images each; here "
            f"there are {steps_now}, of {images_now}: go on with the same images, and with a batch size x accumulation "
            f"x devices of {images}"
        )
    names = ("batches", "images in a batch", "batches in an optimiser step", "devices")
    told, told_now = (
        ", ".join(f"{count} {name}" for count, name in zip(layout, names, strict=True)) for layout in (then, now)
    )
    raise ValueError(
        f"the checkpoint is from within an epoch of {told}, here it has {told_now}: go on with the same images, batch "
        "size, accumulation and devices, or from a checkpoint of an epoch's end"
    )


def _steps(layout: list[int]) -> tuple[int, int]:
    """Optimiser steps in an epoch, and images in each."""
    batches, size, accumulated, devices = layout
    return math.ceil(batches / accumulated), size * accumulated * devices


def _layout(trainer: Trainer) -> list[int]:
    batches, accumulated = int(trainer.num_training_batches), trainer.accumulate_grad_batches
    return [batches, batch_size_of(trainer), accumulated, trainer.world_size]


def _complete(counter: dict[str, int], count: int) -> None:
    for name in counter:
        counter[name] = count
