"""A learning rate by Lightning's range test, for a module whose schedule and scaling follow from it."""

from __future__ import annotations

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder

from relvit.training.messages import rank_zero_print
from relvit.training.sharding import NAME, FullySharded


class FindLearningRate(LearningRateFinder):
    """Before the training, tries learning rates from 1e-8 to 1 for 100 steps, restores weights and random state, and
    gives the module the rate at which the loss fell most steeply (Smith 2017, arXiv 1506.01186).

    Lightning's own callback sets the optimiser's rate alone, which the schedule takes back at its next step; here
    optimiser and schedule are made anew. The rate found is that of the present batch: with `lr_base_batch` it is
    converted. All layers have the same rate during the test, whatever `layer_decay` is.

    Raises:
        ValueError: too few finite losses to judge, or a training in shards.
    """

    def __init__(self) -> None:
        super().__init__(update_attr=False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find and set the learning rate."""
        if trainer.fast_dev_run:
            return
        if isinstance(trainer.strategy, FullySharded):
            raise ValueError(f"strategy {NAME} does not go with --lr_find: leave out one of them")
        pl_module.searching = True
        epochs, trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs, -1
        try:
            self.lr_find(trainer, pl_module)
        finally:
            pl_module.searching = False
            trainer.fit_loop.max_epochs = epochs
        found = self.optimal_lr.suggestion()
        if found is None:
            raise ValueError("the learning-rate finder saw too few finite losses: give --model.lr")
        pl_module.train_metrics.reset()
        # Not `hparams.lr = ...`, which loggers do not see.
        pl_module.save_hyperparameters({"lr": pl_module.hparams.lr * found / pl_module.plan.lr})
        trainer.strategy.setup_optimizers(trainer)
        rank_zero_print(f"learning rate found: {found:.3g}, as --model.lr {pl_module.hparams.lr:.3g}")
