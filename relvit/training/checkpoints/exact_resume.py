"""Exact resume: checkpoints store epoch, step, counters and metrics; from these the random state follows, too.

Lightning stores the counters of its loops as they are when a checkpoint happens to be written, in the middle of a hook,
and guesses from the counters what was done. Here a checkpoint holds a `ResumePoint`, in terms of the last optimiser
step, to which weights, averages and optimiser belong; the counters are set by that point before Lightning reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from lightning import Trainer
from torch import Tensor
from torchmetrics import MetricCollection

from relvit.data.loading.sampler import training_position
from relvit.training.lightning_internals import validation_due
from relvit.training.optim.schedule import batch_size_of

# The key of the `ResumePoint` in a checkpoint.
POINT_KEY = "position"
# Lightning's key of the steps that loggers count, in the state of the training epoch's loop.
STEPS_KEY = "_batches_that_stepped"

States = dict[str, dict[str, Any]]


class ResumePoint(NamedTuple):
    """The progress of a training between two optimiser steps.

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
    def of(cls, trainer: Trainer, validated_at: tuple[int, int] | None, ended_epoch: int | None) -> ResumePoint:
        """Describe a running training, given epoch and batch of the last validation and the last complete epoch."""
        done = epoch, batch = training_position(trainer)
        if batch == 0 and epoch > 0 and ended_epoch != epoch - 1:
            # All batches are done, but what follows them is not.
            done = epoch - 1, trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return cls(*done, _layout(trainer), done == validated_at)


def begins_epoch_again(point: ResumePoint, batch_size: int, accumulated: int, devices: int) -> bool:
    """Return whether a training cannot go on within the epoch of a checkpoint, because batches are divided otherwise.

    Args:
        point: of the checkpoint.
        batch_size, accumulated, devices: images in a batch, batches in an optimiser step, and devices from now on.

    Raises:
        ValueError: the optimiser steps have another number of images, which no checkpoint goes on with.
    """
    _, size_then, accumulated_then, devices_then = point.layout
    then, now = size_then * accumulated_then * devices_then, batch_size * accumulated * devices
    if then != now:
        share = then / (accumulated * devices)
        hint = f": give --batch_size {share:.0f}" if share.is_integer() else ""
        raise ValueError(
            f"the training has optimiser steps of {then} images (batch size x accumulation x devices: {size_then} x "
            f"{accumulated_then} x {devices_then}), and these would be {now} ({batch_size} x {accumulated} x "
            f"{devices}){hint}"
        )
    return point.batch > 0 and [batch_size, accumulated, devices] != point.layout[1:]


def set_counters(checkpoint: dict[str, Any], point: ResumePoint) -> None:
    """Set the counters of a checkpoint's training loop as if everything before the point were complete."""
    loop = checkpoint["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    under_way = point.batch > 0
    epochs = loop["epoch_progress"]
    for counter in (epochs["total"], epochs["current"]):
        counter["ready"] = counter["started"] = point.epoch + under_way
        counter["processed"] = counter["completed"] = point.epoch
    # Batches that were only accumulated are done once more.
    again = batches["current"]["processed"] - point.batch if under_way else 0
    _complete(batches["total"], batches["total"]["processed"] - again)
    _complete(batches["current"], point.batch)
    batches["is_last_batch"] = False
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (steps["step"], steps["zero_grad"], loop["epoch_loop.scheduler_progress"]):
        for counter in (progress["total"], progress["current"]):
            _complete(counter, counter["completed"])
    validation = loop["epoch_loop.val_loop.batch_progress"]
    for counter in (validation["total"], validation["current"]):
        _complete(counter, 0)
    # Lightning validates first, where a validation is due, if the last one seems to have stopped at its first batch.
    validation["total"]["ready"] = validation["total"]["started"] = 0 if point.validated else 1
    validation["is_last_batch"] = False
    loop["epoch_loop.state_dict"][STEPS_KEY] = steps["step"]["total"]["completed"]


def is_last_of_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether this training batch ends its epoch; data without a length announce their last batch."""
    return trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches


def go_on(trainer: Trainer, point: ResumePoint) -> None:
    """Set what a trainer does next, whose loops have the counters of `set_counters` and are about to run."""
    loop = trainer.fit_loop.epoch_loop
    # Early stopping has decided, but the decision itself is in no checkpoint.
    if any(callback.wait_count >= callback.patience for callback in trainer.early_stopping_callbacks):
        trainer.should_stop = True
    if point.batch == 0:
        # A new epoch like any other.
        loop.restarting = False
        return
    loop.batch_progress.is_last_batch = point.batch >= trainer.num_training_batches
    if validation_due(trainer):
        # The loop counts the step that led to this validation a second time when it passes the validation.
        state = loop.on_save_checkpoint()
        loop.on_load_checkpoint(state | {STEPS_KEY: state[STEPS_KEY] - 1})


def check_layout(trainer: Trainer, point: ResumePoint) -> None:
    """Refuse to resume with other optimiser steps than before.

    Within an epoch the layout has to stay. At an epoch's end batch size, accumulation and devices may change, but not
    the images in an optimiser step, from which the learning rate follows, nor the steps in an epoch, from which the
    schedule follows.
    """
    then, now = point.layout, _layout(trainer)
    if then == now or (point.batch == 0 and _steps(then) == _steps(now)):
        return
    if point.batch == 0:
        (steps, images), (steps_now, images_now) = _steps(then), _steps(now)
        raise ValueError(
            f"the checkpoint is from a training of {steps} optimiser steps in an epoch, of {images} images each; here "
            f"there are {steps_now}, of {images_now}: go on with the same images, and with a batch size x accumulation "
            f"x devices of {images}"
        )
    names = ("batches", "images in a batch", "batches in an optimiser step", "devices")
    text, text_now = (
        ", ".join(f"{count} {name}" for count, name in zip(layout, names, strict=True)) for layout in (then, now)
    )
    raise ValueError(
        f"the checkpoint is from within an epoch of {text}, here it has {text_now}: go on with the same images, batch "
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


def copy_states(metrics: MetricCollection) -> States:
    """Copy the states of metrics whose states are sums; Lightning puts them into no checkpoint within an epoch."""
    return {
        name: {"updates": metric.update_count, **{key: value.clone() for key, value in metric.metric_state.items()}}
        for name, metric in metrics.items(keep_base=True)
    }


def gather_states(states: States) -> list[States]:
    """Gather the states of all processes, on the CPU; every process has to call this, also one without states."""
    own = {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
        for name, state in states.items()
    }
    if not torch.distributed.is_initialized():
        return [own]
    gathered: list[States] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def states_of_process(stored: Sequence[States], rank: int, world: int) -> States:
    """Select the states to resume with: the process's own; if the number of processes changed, all in the first.

    Sums in another order differ in the last digits, so each process keeps its own where that is possible.
    """
    if len(stored) == world:
        return stored[rank]
    summed: States = {}
    for name, state in (item for states in stored for item in states.items() if rank == 0):
        before = summed.get(name)
        summed[name] = dict(state) if before is None else {key: before[key] + state[key] for key in state}
    return summed


def restore_states(metrics: MetricCollection, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Load states into metrics."""
    for name, metric in metrics.items(keep_base=True):
        if name not in states:
            continue
        for key, value in states[name].items():
            if key == "updates":
                metric._update_count = value
            else:
                setattr(metric, key, value.to(metric.device))
