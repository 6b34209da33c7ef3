"""Learning rate finder (`--lr_find`): run Lightning's range test before the training, and choose the rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import lr_finder as lightning_lr_finder
from scipy.ndimage import gaussian_filter1d
from tqdm import tqdm

from relvit.app.utils.progress import rank_zero_print

LOWEST, HIGHEST, STEPS = 1e-7, 1.0, 100
# The losses are smoothed over neighbouring rates by a Gaussian, whose standard deviation is this number of steps of the
# test: a third of a decade of rates.
WIDTH = 5
# A fall of the smoothed loss counts as noise if it is at most this number of standard deviations of the smoothed loss.
CLEAR = 5.0


class FindLearningRate(LearningRateFinder):
    """Set the learning rate to the result of `steepest_fall` after a range test before the training.

    The test tries rates from 1e-7 to 1 in 100 steps, then restores weights and random state. If the test finds no rate
    above `min_lr`, the configured rate stays. The rate found is for the present batch size; if `lr_base_batch` is
    given, `lr` becomes the rate for `lr_base_batch` images. During the test all layers have the same rate, whatever
    `layer_decay` and `position_lr_scale` are.

    A training that is resumed is refused (ValueError), because the states in its checkpoint hold the learning rate.

    Lightning's own callback does not work here, because it changes only the optimiser's rate, which the schedule
    overwrites at its next step. Lightning's callback also divides the fall of the loss by the difference of the rates,
    not of their logarithms, and hardly smooths the losses at small rates. So with few images Lightning's callback takes
    noise for a fall.

    Attributes:
        rates: The learning rate of each batch of the test.
        losses: The loss of each batch of the test.
    """

    def __init__(self) -> None:
        super().__init__(LOWEST, HIGHEST, STEPS, update_attr=False)
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:
            return
        if trainer.ckpt_path is not None:
            raise ValueError(
                "FindLearningRate is for a new training, and a resumed training keeps its learning rate: leave the "
                "callback out"
            )
        epochs, trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs, -1
        # Lightning's range test shows a progress bar that no option hides, so replace `tqdm` during the test.
        lightning_lr_finder.tqdm = partial(tqdm, disable=trainer.progress_bar_callback is None)
        pl_module.range_test = []
        try:
            self.lr_find(trainer, pl_module)
        finally:
            self.rates = [rate for rate, _ in pl_module.range_test]
            self.losses = [loss for _, loss in pl_module.range_test]
            pl_module.range_test = None
            lightning_lr_finder.tqdm = tqdm
            trainer.fit_loop.max_epochs = epochs
        # Each process has computed a rate from the losses of its own images, so let all take the main process's rate.
        found = trainer.strategy.broadcast(steepest_fall(self.rates, self.losses))
        pl_module.train_metrics.reset()
        # High rates may have made the loss infinite or NaN. The check of the training's first step must not see these
        # losses.
        pl_module.finite.forget()
        configured, min_lr = pl_module.hparams.lr, pl_module.hparams.min_lr
        if found is not None and found > min_lr:
            # Loggers record the initial hyperparameters, which `save_hyperparameters` changes, too; an assignment to
            # `hparams.lr` would not.
            base, batch = pl_module.hparams.lr_base_batch, pl_module.plan.batch
            pl_module.save_hyperparameters({"lr": found * base / batch if base else found})
            rank_zero_print(f"learning rate found: {found:.3g}, as --model.lr {pl_module.hparams.lr:.3g}")
        else:
            reason = f"the loss fell nowhere clearly between learning rates of {LOWEST:g} and {HIGHEST:g}"
            if found is not None:
                reason = f"the learning rate found, {found:.3g}, is not above --model.min_lr {min_lr:g}"
            rank_zero_print(f"Warning: --lr_find: {reason}; the training keeps --model.lr {configured:g}")
        trainer.strategy.setup_optimizers(trainer)


def steepest_fall(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Find the learning rate at which the loss falls most steeply per order of magnitude, before its minimum.

    Source: the range test of Smith 2017 (arXiv 1506.01186).

    Args:
        rates: The learning rates of the batches, rising; several batches may have the same rate.
        losses: The losses of the batches; losses that are not finite are left out.

    Returns:
        The rate. None if the loss does not fall clearly more than it scatters, or falls most steeply at an end of the
        range.
    """
    finite = np.isfinite(losses)
    x, index = np.unique(np.asarray(rates)[finite], return_inverse=True)
    if len(x) < 4 * WIDTH:
        return None
    y = np.bincount(index, np.asarray(losses)[finite]) / np.bincount(index)
    # At high rates the loss explodes, and its values would dominate the smoothed losses: limit them.
    y = np.minimum(y, 2 * y[: len(y) // 4].mean())
    smooth = gaussian_filter1d(y, WIDTH, mode="nearest")
    lowest = int(smooth.argmin())
    # Estimate the standard deviation of a smoothed loss. Differences of independent losses have sqrt(2) times the
    # standard deviation of a loss, and smoothing is like the mean of 2 sqrt(pi) WIDTH losses.
    scatter = np.diff(y[: lowest + 1]).std() / np.sqrt(2) / np.sqrt(2 * np.sqrt(np.pi) * WIDTH) if lowest > 1 else 0.0
    if smooth[: lowest + 1].max() - smooth[lowest] <= CLEAR * scatter:
        return None
    steepest = int(np.gradient(smooth, np.log10(x))[: lowest + 1].argmin())
    at_an_end = steepest < WIDTH or steepest > len(x) - 1 - WIDTH
    return None if at_an_end else float(x[steepest])
