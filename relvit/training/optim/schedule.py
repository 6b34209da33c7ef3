"""Learning rate per optimiser step."""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning import Trainer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(step: int, total: int, warmup: int, floor: float) -> float:
    """Factor on the learning rate at an optimiser step: a linear rise, then half a cosine down to `floor`.

    The first step already has 1 / (warmup + 1) of the full rate, step `warmup` has all of it, step `total - 1` is one
    step short of `floor`. As in DeiT (Touvron et al. 2021, arXiv 2012.12877, table 9), but per step, not per epoch.

    Args:
        step: 0 for the first optimiser step.
        total: number of steps of the training.
        warmup: steps of the rise, fewer than `total`.
        floor: last factor, in 0 ... 1.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Plan(NamedTuple):
    """What a training amounts to on the devices that it has.

    Attributes:
        batch: images per optimiser step, over all devices and accumulated batches.
        lr: peak learning rate, scaled where scaling is asked for.
        steps: optimiser steps of the whole training.
        warmup: those of the warm-up among them, at most half.
        warmup_asked: those that it would take by `warmup_epochs`.
    """

    batch: int
    lr: float
    steps: int
    warmup: int
    warmup_asked: int


def make_plan(trainer: Trainer, lr: float, base_batch: int | None, warmup_epochs: float) -> Plan:
    """Batch, learning rate and steps for a trainer that is about to fit.

    A last, partial accumulation of an epoch ends in an optimiser step as well. The warm-up takes at most half of the
    steps, so that the full rate is reached and something is done with it: in a training that goes on for longer than it
    was meant to, it is that of the longer one. With `base_batch`, `lr` is meant for
    that many images per step and grows in proportion (Goyal et al. 2017, arXiv 1706.02677).

    Raises:
        ValueError: a training without end or with epochs of unknown length, or an unknown batch size.
    """
    # Lightning does so by itself where it needs the length, not where --trainer.max_steps alone ends the training.
    trainer.fit_loop.setup_data()
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise ValueError("the cosine needs an end: give --trainer.max_epochs or --trainer.max_steps")
    if not math.isfinite(trainer.num_training_batches):
        if warmup_epochs:
            raise ValueError(f"the data does not know its length, so warmup_epochs {warmup_epochs:g} has none: give 0")
        per_epoch = 0
    else:
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    batch = batch_size_of(trainer) * trainer.accumulate_grad_batches * trainer.world_size
    warmup = round(warmup_epochs * per_epoch)
    return Plan(
        batch=batch,
        lr=lr * batch / base_batch if base_batch else lr,
        steps=int(steps),
        warmup=min(warmup, int(steps) // 2),
        warmup_asked=warmup,
    )


def set_rates(scheduler: LambdaLR) -> None:
    """Give the optimiser the rates of the scheduler's step.

    A checkpoint holds those that the schedule had when it was written, which is another one where the training has
    become longer.
    """
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(scheduler.last_epoch)


def batch_size_of(trainer: Trainer) -> int:
    """Images per batch and device, as the loader of the training says."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not size:
        raise ValueError(f"the training loader, {type(loader).__name__}, does not say its batch_size")
    return int(size)


def describe(plan: Plan, trainer: Trainer, lr: float, base_batch: int | None) -> str:
    """A plan in a line, and how batch and learning rate come about: from the `lr` for `base_batch` images, see
    `make_plan`; one more line where the warm-up is shortened."""
    factors = (trainer.accumulate_grad_batches, trainer.world_size)
    parts = " x ".join(str(n) for n in (plan.batch // (factors[0] * factors[1]), *factors))
    scaled = f" ({lr:g} x {plan.batch} / {base_batch})" if base_batch else ""
    note = ""
    if plan.warmup < plan.warmup_asked:
        note = (
            f"\nNote: the warm-up would take {plan.warmup_asked} steps: it takes {plan.warmup}, half of the training, "
            "so that the full learning rate is reached"
        )
    return (
        f"effective batch {plan.batch} ({parts}: batch, accumulation, devices), learning rate {plan.lr:g}{scaled}, "
        f"steps {plan.steps}, warm-up {plan.warmup}{note}"
    )
