"""Learning rate: scaled by the loader's batch size on all devices; warm-up and cosine decay per optimiser step."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import NamedTuple

from lightning import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset

# A `Schedule` is a function that is called as `warmup_cosine` is: `schedule(step, total=..., warmup=..., floor=...)`.
Schedule = Callable[..., float]
DEFAULT = "relvit.app.training.warmup_cosine"
# Print a note if `lr_base_batch` reduces the learning rate to an eighth (1 / SMALL) of the option `lr`, or less.
SMALL = 8
LENGTH = "--trainer.limit_train_batches, the number of batches of an epoch"


def warmup_cosine(step: int, total: int, warmup: int, floor: float) -> float:
    """Compute the factor on the learning rate at an optimiser step: a linear rise, then half a cosine down to `floor`.

    Step 0 has 1 / (warmup + 1) of the full rate, and step `warmup` has the full rate. The rate would reach `floor` at
    step `total`, one step after the last. DeiT has the same schedule, with a new rate for each epoch instead of each
    step (Touvron et al. 2021, arXiv 2012.12877, table 9).

    Args:
        step: The optimiser step, counted from 0.
        total: The number of steps of the training.
        warmup: The number of steps of the rise, fewer than `total`.
        floor: The factor at the end, in 0 ... 1.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def schedule_of(schedule: str | Schedule) -> Schedule:
    """Return a schedule; a schedule that is given as 'module.function' is imported.

    Raises:
        ValueError: The module in 'module.function' cannot be imported, or does not have the function.
        TypeError: The function does not take a step, `total`, `warmup` and `floor`.
    """
    function = schedule
    if isinstance(schedule, str):
        module, _, name = schedule.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"schedule {schedule!r} is not a function of a module ({error}): give 'module.name'"
            ) from error
    try:
        inspect.signature(function).bind(0, total=1, warmup=0, floor=0.0)
    except TypeError as error:
        raise TypeError(
            f"schedule {schedule_name(schedule)} must take (step, total, warmup, floor): {error}"
        ) from error
    return function


def schedule_name(schedule: str | Schedule) -> str:
    """Return the 'module.function' by which a checkpoint records a schedule."""
    if isinstance(schedule, str):
        return schedule
    kind = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return DEFAULT if schedule is warmup_cosine else name


class Plan(NamedTuple):
    """Batch, learning rate and steps of a training on its devices.

    Attributes:
        batch: Images per optimiser step, over all devices and accumulated batches; no more than an epoch has.
        lr: The peak learning rate for this batch.
        steps: The number of optimiser steps of the training.
        warmup: The number of steps of the warm-up, at most half of `steps`.
        warmup_asked: The number of steps of the warm-up according to `warmup_epochs`.
    """

    batch: int
    lr: float
    steps: int
    warmup: int
    warmup_asked: int

    def scheduler(self, optimizer: Optimizer, min_lr: float, schedule: str | Schedule = DEFAULT) -> LambdaLR:
        """Build the scheduler, whose floor is `min_lr`."""
        if min_lr > self.lr:
            raise ValueError(
                f"min_lr {min_lr:g} exceeds {self.lr:g}, the learning rate for {self.batch} images: give a min_lr of "
                "at most that, such as 0, or a larger lr"
            )
        floor = min_lr / self.lr if self.lr else 0.0
        return LambdaLR(optimizer, partial(schedule_of(schedule), total=self.steps, warmup=self.warmup, floor=floor))


def make_plan(trainer: Trainer, lr: float, base_batch: int | None, warmup_epochs: float) -> Plan:
    """Plan the training that a trainer is about to begin or to resume.

    `lr` is meant for `base_batch` images per step, and grows in proportion to the batch (Goyal et al. 2017, arXiv
    1706.02677); if `base_batch` is None, `lr` does not change. The warm-up takes at most half of the steps, so that the
    full rate is reached and used.
    """
    # Set up the data, because a warm-up in epochs needs their length. With --trainer.max_steps, Lightning does not need
    # their length for `estimated_stepping_batches`, and would not set them up here.
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches is 0, so there is nothing to train on: give 1 or more, or a share")
    trainer.fit_loop.setup_data()
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise ValueError("the cosine schedule needs an end: give --trainer.max_epochs or --trainer.max_steps")
    if steps < 0:
        # If the data have no length, Lightning returns `max_steps`, which is -1 if the user has not given it.
        raise ValueError(
            f"the data has no length, so the steps of max_epochs {trainer.max_epochs} cannot be counted: give "
            f"--trainer.max_steps and warmup_epochs 0, or {LENGTH}"
        )
    warmup = steps_of(trainer, "warmup_epochs", warmup_epochs)
    batch = _images_of_a_step(trainer) * trainer.world_size
    scaled = lr * batch / base_batch if base_batch else lr
    return Plan(batch, scaled, int(steps), min(warmup, int(steps) // 2), warmup)


def steps_of(trainer: Trainer, name: str, epochs: float) -> int:
    """Compute the number of optimiser steps of a number of epochs; `name` is the option that gives the epochs."""
    if not epochs:
        return 0
    batches = trainer.num_training_batches
    if not math.isfinite(batches):
        raise ValueError(
            f"the data has no length, so the steps of {name} {epochs:g} cannot be counted: give {name} 0, or {LENGTH}"
        )
    # Round up, because the last step of an epoch counts as a step, even if it has fewer batches.
    return round(epochs * math.ceil(batches / trainer.accumulate_grad_batches))


def batch_size_of(trainer: Trainer) -> int:
    """Return the number of images per batch and device, which the dataloader of the training says."""
    loader = trainer.train_dataloader
    parts = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    size = next((size for part in parts if (size := getattr(part, "batch_size", None))), None)
    if not size:
        name = type(loader).__name__
        if isinstance(loader, Sequence | Mapping):
            raise ValueError(
                f"the training images come from a {name} of loaders: give one loader, such as a DataLoader"
            )
        # Allow an `IterableDataset`, because pipelines that make batches, such as webdataset's WebLoader, derive from
        # it.
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ValueError(
                f"the training images come from a dataset, {name}: give a loader, such as DataLoader(dataset, 64, "
                "shuffle=True)"
            )
        given = f"the training loader, {name}, does not say its batch_size"
        # PyTorch forbids to set `batch_size` of a DataLoader, but not of its samplers, so suggest one of the samplers.
        which = next((each for each in ("batch_sampler", "sampler") if getattr(loader, each, None) is not None), None)
        part = f"its {which}, {type(getattr(loader, which)).__name__}," if which else "it"
        raise ValueError(f"{given}: give {part} the attribute batch_size, the number of images in a batch")
    return int(size)


def _images_of_a_step(trainer: Trainer) -> int:
    """Return the number of images per optimiser step and device: the end of an epoch ends a step of few images."""
    size = batch_size_of(trainer) * min(trainer.accumulate_grad_batches, trainer.num_training_batches)
    sampler = getattr(trainer.train_dataloader, "sampler", None)
    # A sampler of batches has their number as its length, and a loader without a length has a sampler without one.
    known = getattr(trainer.train_dataloader, "batch_size", None) and isinstance(sampler, Sized)
    return min(size, len(sampler)) if known else size


def update_rates(scheduler: LambdaLR) -> None:
    """Set the optimiser's learning rates by the scheduler's step.

    Lightning restores the rates in a checkpoint. These rates are wrong if the user has made the training longer or
    shorter since, because the schedule then has other rates at this step.
    """
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(scheduler.last_epoch)


def describe(
    plan: Plan, trainer: Trainer, lr: float, base_batch: int | None, freeze_epochs: int, position_lr_scale: float
) -> str:
    """Describe a plan in a line, with the factors of batch and learning rate, and unexpected effects in further lines.

    Unexpected effects are a learning rate that is much smaller than `lr`, a warm-up that is shorter than the user asked
    for, and a backbone that stays frozen until the end.
    """
    accumulated, devices = trainer.accumulate_grad_batches, trainer.world_size
    scaled = f" ({lr:g} x {plan.batch} / {base_batch})" if base_batch else ""
    if position_lr_scale != 1:
        scaled += f", of relative positions {plan.lr * position_lr_scale:g}"
    size = batch_size_of(trainer)
    whole = plan.batch == size * accumulated * devices
    made_of = f"{size} x {accumulated} x {devices}: batch, accumulation, devices" if whole else "an epoch has no more"
    text = (
        f"effective batch {plan.batch} ({made_of}), learning rate {plan.lr:g}{scaled}, steps {plan.steps}, "
        f"warm-up {plan.warmup}"
    )
    if base_batch and plan.batch * SMALL <= base_batch:
        accumulate = accumulated * base_batch // plan.batch
        larger = f"--trainer.accumulate_grad_batches {accumulate} makes such batches; for few images " if whole else ""
        text += (
            f"\nNote: the learning rate is small, since --model.lr {lr:g} is for batches of {base_batch} "
            f"(lr_base_batch): {larger}give --model.lr_base_batch {plan.batch}, which takes {lr:g} as it is"
        )
    # Steps of frozen epochs can be counted only if the loader knows its length.
    known = freeze_epochs and math.isfinite(trainer.num_training_batches)
    if known and steps_of(trainer, "freeze_epochs", freeze_epochs) >= plan.steps:
        text += (
            f"\nNote: the backbone stays frozen to the end, and the classifier alone is trained: freeze_epochs "
            f"{freeze_epochs} is not less than the training; give --model.freeze_epochs 0 to train everything"
        )
    if 0 < plan.warmup < plan.warmup_asked:
        text += (
            f"\nNote: the warm-up would take {plan.warmup_asked} steps: it takes {plan.warmup}, half of the training, "
            "so that the full learning rate is reached"
        )
    elif plan.warmup < plan.warmup_asked:
        text += "\nNote: the training is too short for a warm-up, so there is none"
    return text
