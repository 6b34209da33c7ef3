"""Callbacks and options of Lightning's Trainer that each training refuses, also in Python, and their replacements.

`docs/options.md` lists these callbacks and options. Everything else of Lightning works: `tests/app/cli/trainer` trains
and resumes with each callback and each argument of the Trainer.
"""

from __future__ import annotations

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from relvit.app.data import ImageData
from relvit.app.training.lightning_internals import syncs_batch_norm, validates_by_clock
from relvit.app.training.optim.lr_finder import FindLearningRate
from relvit.app.training.optim.strategy import check_strategy

# For each callback, the text says why a training refuses it and its subclasses, and what to use instead.
REFUSED: dict[type[Callback], str] = {
    BaseFinetuning: "it adds parameters to the optimiser for which the schedule has no rate; to train the classifier "
    "first, give --model.freeze_epochs N, and smaller rates for lower layers by --model.layer_decay 0.75",
    BatchSizeFinder: "the learning rate and the number of steps are planned for the batch size of the start; give "
    "--batch_size N, and see the memory that it takes in metrics.csv (system/memory_gb)",
    GradientAccumulationScheduler: "the schedule counts optimiser steps of one size; give "
    "--trainer.accumulate_grad_batches N",
    LearningRateFinder: "it changes the optimiser's rate alone, which the schedule sets anew at its next step; give "
    "--lr_find, which runs its range test (in Python: relvit.app.training.FindLearningRate)",
    ModelPruning: "it renames the weights, so that no checkpoint could be loaded; prune the model after the training, "
    "by torch.nn.utils.prune",
    SpikeDetection: "it reads a loss that Lightning does not hand to it; --model.nonfinite and "
    "--trainer.gradient_clip_val treat losses and gradients that explode",
    StochasticWeightAveraging: "it takes the place of the schedule; give --model.ema_decay 0.999, or average the "
    "checkpoints afterwards by relvit average",
    WeightAveraging: "in checkpoints its average would take the place of the weights; give --model.ema_decay 0.999, "
    "whose checkpoints hold both",
}
# These callbacks only write to a logger. A training without a logger refuses them, since they would have no effect.
LOGGING = (DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor)


# `HALF` maps each precision whose weights have two bytes to the similar precision whose weights are float32.
HALF = {"bf16-true": "bf16-mixed", "16-true": "16-mixed"}
# This is the smallest positive float16: a smaller epsilon may become zero in float16.
LEAST_HALF = 2.0**-24


def check_trainer(trainer: Trainer, ema_decay: float | None) -> None:
    """Refuse a trainer that cannot use the classifier, or would not train it as the classifier's options say.

    Args:
        trainer: The trainer, which is about to run.
        ema_decay: The decay of the average of the weights; None: there is no average.

    Raises:
        ValueError: A callback is of a class in `REFUSED`, which says why; or of a class in `LOGGING`, and the trainer
            has no logger.
        ValueError: The strategy divides the weights among devices.
        ValueError: A subclass of the classifier optimises manually.
        ValueError: `overfit_batches` is given with an `ImageData`.
        ValueError: There are several processes, and `val_check_interval` is a time.
        ValueError: `sync_batchnorm` is given for a model with batch norms that `SyncBatchNorm` cannot replace.
        ValueError: `ema_decay` is given with the precision 'bf16-true' or '16-true', whose weights have two bytes.
    """
    check_strategy(trainer.strategy)
    if trainer.state.fn != "fit":
        return
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "automatic_optimization is False, and Lightning then leaves out the schedule, the average of the weights "
            "and the progress in checkpoints: leave it True and return the loss from training_step, or write a "
            "LightningModule around the classifier's net"
        )
    for callback in trainer.callbacks:
        check_callback(callback, bool(trainer.loggers))
    if trainer.overfit_batches and isinstance(trainer.datamodule, ImageData):
        raise ValueError(
            f"overfit_batches {trainer.overfit_batches} takes the first images in order, which are often of one class: "
            "to see whether a model can learn a few images by heart, train on a folder or a list of a few images of "
            "each class, with --data.augment none"
        )
    if trainer.world_size > 1 and validates_by_clock(trainer):
        raise ValueError(
            "val_check_interval is a time, after which each process would begin to validate by its own clock, perhaps "
            "not at the same step: give a number of batches, or a part of an epoch"
        )
    if syncs_batch_norm(trainer):
        check_batch_norms(trainer.lightning_module)
    if ema_decay is not None and str(trainer.precision) in HALF:
        raise ValueError(
            f"an average of weights (ema_decay {ema_decay:g}) would be lost in the rounding of precision "
            f"{trainer.precision}: give --precision {HALF[str(trainer.precision)]}, or no ema_decay"
        )


def check_batch_norms(model: nn.Module) -> None:
    """Refuse subclasses of batch norm, such as timm's `BatchNormAct2d`, whose activation `SyncBatchNorm` would drop.

    Raises:
        ValueError: The model has such a batch norm.
    """
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module) not in plain:
            raise ValueError(
                f"sync_batchnorm would replace {type(module).__name__} by a batch norm without its activation: leave "
                "sync_batchnorm out"
            )


def check_callback(callback: Callback, logger: bool) -> None:
    """Refuse a callback in `REFUSED`, or one that only writes to a logger, if there is no logger."""
    name, kinds = type(callback).__name__, type(callback).__mro__
    # `FindLearningRate` derives from a refused callback (`LearningRateFinder`), but works with relvit's schedule.
    if isinstance(callback, FindLearningRate):
        return
    if reason := next((REFUSED[kind] for kind in kinds if kind in REFUSED), None):
        raise ValueError(f"Lightning's {name} cannot be used here: {reason}")
    if isinstance(callback, LOGGING) and not logger:
        raise ValueError(
            f"Lightning's {name} writes to a logger, and there is none: give one (--logger wandb, or "
            "--trainer.logger CSVLogger --trainer.logger.save_dir DIR), or leave the callback out: metrics.csv has "
            "the learning rate, images per second and memory of each epoch"
        )


def check_epsilon(trainer: Trainer, optimizer: Optimizer) -> None:
    """Refuse an optimiser whose epsilon is zero in the float16 of precision 16-true, since it would divide by zero.

    Raises:
        ValueError: The precision is '16-true', and the optimiser's `eps` is below `LEAST_HALF`.
    """
    epsilon = optimizer.defaults.get("eps")
    if str(trainer.precision) == "16-true" and isinstance(epsilon, float) and epsilon < LEAST_HALF:
        raise ValueError(
            f"the optimiser's eps {epsilon:g} is zero in the float16 of precision 16-true, so that weights become NaN: "
            "give --precision 16-mixed, or --model.opt_kwargs.eps 1e-4"
        )
