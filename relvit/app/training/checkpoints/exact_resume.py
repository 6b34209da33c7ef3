"""Exact resume: store epoch, batch and validation in a checkpoint, and set Lightning's counters from them.

Lightning writes the counters of its loops into a checkpoint. These counters may be inconsistent, because a checkpoint
is written in the middle of a hook, so Lightning has to guess the progress from them. A checkpoint of relvit also holds
a `ResumePoint`, which describes the training at the last optimiser step: the weights, averages and optimiser in the
checkpoint belong to this step. When a training resumes, relvit sets the counters by the `ResumePoint` before Lightning
reads them. Epoch and batch determine the random state, so checkpoints do not store it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR

from relvit.app.data.loading.sampler import all_batches_done, training_position
from relvit.app.training.checkpoints.upgrades import KEY
from relvit.app.training.lightning_internals import (
    data_ended,
    loader_states,
    record_loaders,
    validation_due,
)
from relvit.app.training.optim.schedule import batch_size_of, update_rates
from relvit.app.utils.shown_text import counted

# A checkpoint holds the `ResumePoint` under this key.
POINT_KEY = "position"
# Lightning's state of the training loop holds the number of optimiser steps so far under this key. Lightning gives this
# number to loggers as the step.
STEPS_KEY = "_batches_that_stepped"
# The states of optimiser and schedule in a checkpoint hold the values of these arguments of `ImageClassifier`.
OPTIMISER = ("opt", "opt_kwargs", "lr", "lr_base_batch", "weight_decay", "layer_decay", "position_lr_scale")


class ResumePoint(NamedTuple):
    """The progress of a training between two optimiser steps.

    Attributes:
        epoch: The epoch that is under way or about to begin.
        batch: The number of batches of this epoch that each device has done.
        layout: Four numbers: batches of an epoch on each device (0 for data without a length), images in a batch,
            batches in an optimiser step, and devices.
        validated: Whether a validation was complete at this point. If no validation is due here, the value is also
            False.
        last: Whether the epoch has no further batch.
    """

    epoch: int
    batch: int
    layout: list[int]
    validated: bool
    last: bool = False

    @classmethod
    def of(cls, trainer: Trainer, validated_at: tuple[int, int] | None, ended_epoch: int | None) -> ResumePoint:
        """Describe a running training, by the epoch and batch of the last validation and the last complete epoch."""
        done = epoch, batch = training_position(trainer)
        if batch == 0 and epoch > 0 and ended_epoch != epoch - 1:
            # All batches of an epoch are done, so `training_position` returns the next epoch. But the validation at the
            # end of the epoch may not be complete, so the epoch is still under way.
            done = epoch - 1, trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return cls(*done, _layout(trainer), done == validated_at, done[1] > 0 and all_batches_done(trainer))


class Progress:
    """The progress of a classifier's training: a checkpoint stores it, and a resumed training continues from it."""

    def __init__(self) -> None:
        self._validated_at: tuple[int, int] | None = None
        self._ended_epoch: int | None = None
        # The training resumes from this point of the checkpoint. The point is None in a new training, and after a
        # resumed training has started.
        self._resumed: ResumePoint | None = None
        # These are the states of the training loaders in the checkpoint, if the loaders have a `state_dict`.
        self._loader_states: list[Any] = []

    def note_validation(self, trainer: Trainer) -> None:
        """Note that a validation is complete."""
        self._validated_at = training_position(trainer)

    def note_epoch(self, trainer: Trainer) -> None:
        """Note that an epoch is complete; warn if a stream ended before the planned batches of the epoch."""
        self._ended_epoch = trainer.current_epoch
        batches, planned = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches
        if data_ended(trainer) and batches < planned < math.inf:
            rank_zero_warn(
                f"the training data ended after {batches} of {planned} batches of an epoch; Lightning does not "
                "validate after such an epoch, and the schedule of the learning rate will not reach its end: give "
                f"--trainer.limit_train_batches {batches}"
            )

    def save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> ResumePoint:
        """Store in a checkpoint where a training is, and return this point."""
        point = ResumePoint.of(trainer, self._validated_at, self._ended_epoch)
        checkpoint[POINT_KEY] = point._asdict()
        epochs = trainer.fit_loop.epoch_progress.current
        under_way = epochs.started > epochs.processed and not all_batches_done(trainer)
        if under_way and "loops" in checkpoint:
            state = checkpoint["loops"]["fit_loop"]["state_dict"]
            if states := loader_states(trainer, point.batch):
                state["combined_loader"] = states
            elif point.batch == 0:
                # The training resumes at the start of the first epoch, so the loaders must start there, too.
                state.pop("combined_loader", None)
        return point

    def load(self, checkpoint: dict[str, Any], arguments: Mapping[str, Any]) -> bool:
        """Set the counters of a checkpoint by the point that it holds; return whether it holds one.

        Refuse to resume if the `arguments` of the classifier have other options of the optimiser than the checkpoint.
        The checkpoint's states of optimiser and schedule hold these options, so that new values would be ignored.
        """
        if "optimizer_states" not in checkpoint:
            raise ValueError(
                "the checkpoint holds only weights (as an average does), so no training can resume from it: start a "
                "training from these weights with pretrained"
            )
        # A checkpoint that was saved after a test holds no point, so there are no counters to set.
        if checkpoint.get(POINT_KEY) is None:
            return False
        trained = checkpoint.get(KEY, {}).get("model", {})
        for name in OPTIMISER:
            before, given = trained.get(name), arguments.get(name)
            # Compare with `or None`, because empty `opt_kwargs` mean the same as None.
            if name in trained and (before or None) != (given or None):
                raise ValueError(
                    f"the checkpoint was trained with {name} {before}, not {given}, and holds the state of that "
                    f"optimiser: give {name} {before}, or start another training from these weights with pretrained"
                )
        self._resumed = point = ResumePoint(**checkpoint[POINT_KEY])
        self._loader_states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        _set_counters(checkpoint, point)
        self._validated_at = (point.epoch, point.batch) if point.validated else None
        self._ended_epoch = point.epoch - 1
        return True

    def check_layout(self, trainer: Trainer) -> None:
        """Refuse to resume with other steps than before.

        Within an epoch the layout (see `ResumePoint`) must not change. At the end of an epoch, batch size, accumulation
        and devices may change. But the number of images in an optimiser step, on which the learning rate depends, must
        not change, and neither must the number of steps in an epoch, on which the schedule depends.
        """
        point = self._resumed
        if point is None:
            return
        then, now = point.layout, _layout(trainer)
        if then == now or (point.batch == 0 and _steps(then) == _steps(now)):
            return
        if point.batch == 0:
            # `_steps` returns 0 steps if the number is not known, because the data have no length.
            text, text_now = (
                f"{counted(count, 'step') if count else 'an unknown number of steps'} in an epoch, of "
                f"{counted(size, 'image')} each"
                for count, size in (_steps(then), _steps(now))
            )
            raise ValueError(
                f"the checkpoint is from a training of {text}, here it has {text_now}: go on with the same images, and "
                f"with a batch size x accumulation x devices of {_steps(then)[1]}"
            )
        names = ("batches", "images in a batch", "batches in an optimiser step", "devices")
        text, text_now = (
            ", ".join(f"{name}: {count or 'unknown'}" for count, name in zip(layout, names, strict=True))
            for layout in (then, now)
        )
        raise ValueError(
            f"the checkpoint is from within an epoch with {text}; here an epoch has {text_now}: go on with the same "
            "images, batch size, accumulation and devices, or from a checkpoint of an epoch's end"
        )

    def restore_loaders(self, trainer: Trainer) -> None:
        """Let training loaders with a `state_dict`, which have been set up, go on where the checkpoint was.

        The training loop then records the states of the loaders, and a later checkpoint stores the states that the
        loaders had at its last optimiser step.
        """
        states, self._loader_states = self._loader_states, []
        epoch, batch = (0, 0) if self._resumed is None else self._resumed[:2]
        record_loaders(trainer, states, epoch, batch)

    def resume(self, module: LightningModule) -> None:
        """Let a trainer, whose loops are about to run, continue at the point of the checkpoint that `load` has read."""
        trainer, point, self._resumed = module.trainer, self._resumed, None
        # Update only relvit's own scheduler: a subclass may have none, or another scheduler, which Lightning has
        # restored.
        if isinstance(scheduler := module.lr_schedulers(), LambdaLR):
            update_rates(scheduler)
        # A new training has no point, nor has one whose checkpoint was saved after a test.
        if point is None:
            return
        loop = trainer.fit_loop.epoch_loop
        # A checkpoint holds the counters of early stopping, but not whether the training has to stop, so decide again.
        if any(callback.wait_count >= callback.patience for callback in trainer.early_stopping_callbacks):
            trainer.should_stop = True
        if point.batch == 0:
            # `restarting` tells Lightning that the epoch was interrupted; this epoch begins anew, so set it to False.
            loop.restarting = False
            return
        loop.batch_progress.is_last_batch = last = point.last or point.batch >= trainer.num_training_batches
        loader = trainer.train_dataloader
        if not (last or math.isfinite(trainer.num_training_batches) or hasattr(loader, "load_state_dict")):
            rank_zero_warn(
                f"the checkpoint is from within an epoch, and the training loader, {type(loader).__name__}, begins "
                "with its first images again, since it has no length and no state_dict"
            )
        if validation_due(trainer):
            # The loop begins with the validation that is due, and then counts the optimiser step before the validation
            # a second time. So subtract one step from the counter.
            state = loop.on_save_checkpoint()
            loop.on_load_checkpoint(state | {STEPS_KEY: state[STEPS_KEY] - 1})


def begins_epoch_again(point: ResumePoint, batch_size: int, accumulated: int, devices: int) -> bool:
    """Return whether a training that resumes with these numbers must begin the epoch of its `ResumePoint` again.

    Raises:
        ValueError: The optimiser steps would have another number of images than before.
    """
    _, size_then, accumulated_then, devices_then = point.layout
    then, now = size_then * accumulated_then * devices_then, batch_size * accumulated * devices
    if then != now:
        share = then / (accumulated * devices)
        hint = f": give --batch_size {share:.0f}" if share.is_integer() else ""
        raise ValueError(
            f"the training has optimiser steps of {counted(then, 'image')} (batch size x accumulation x devices: "
            f"{size_then} x {accumulated_then} x {devices_then}), and these would be {now} ({batch_size} x "
            f"{accumulated} x {devices}){hint}"
        )
    return point.batch > 0 and [batch_size, accumulated, devices] != point.layout[1:]


def _set_counters(checkpoint: dict[str, Any], point: ResumePoint) -> None:
    """Set the counters of a checkpoint's training loop as if everything before the point were complete."""
    loop = checkpoint["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    under_way = point.batch > 0
    epochs = loop["epoch_progress"]
    for counter in (epochs["total"], epochs["current"]):
        counter["ready"] = counter["started"] = point.epoch + under_way
        counter["processed"] = counter["completed"] = point.epoch
    # Do not count batches whose gradients no optimiser step has used yet, since the resumed training repeats them.
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
    # If no validation was complete at the point, let Lightning resume with a validation, in case one is due: Lightning
    # does so if a validation has started its first batch according to the counters, but processed none.
    validation["total"]["ready"] = validation["total"]["started"] = 0 if point.validated else 1
    validation["is_last_batch"] = False
    loop["epoch_loop.state_dict"][STEPS_KEY] = steps["step"]["total"]["completed"]


def is_last_of_epoch(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether this training batch ends its epoch."""
    # For data without a length, `num_training_batches` is infinite, and only `is_last_batch` announces the last batch,
    # so ask both.
    return trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches


def _steps(layout: list[int]) -> tuple[int, int]:
    """Return the number of optimiser steps in an epoch, and of images in each step."""
    batches, size, accumulated, devices = layout
    return math.ceil(batches / accumulated), size * accumulated * devices


def _layout(trainer: Trainer) -> list[int]:
    batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
    return [int(batches) if math.isfinite(batches) else 0, batch_size_of(trainer), accumulated, trainer.world_size]


def _complete(counter: dict[str, int], count: int) -> None:
    for name in counter:
        counter[name] = count
