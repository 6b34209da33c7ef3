"""A callback that records the configuration of `relvit fit`; other callbacks are in `training/callbacks`."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from relvit.cli.secrets import mask_command, mask_secrets
from relvit.training import record_run
from relvit.utils.files import atomic_write


class RunConfig(SaveConfigCallback):
    """Write `config.yaml` into the run's folder, wherever loggers write, and add to `run.json`.

    The files are written when everything that may refuse the training has passed, and when `--lr_find` has found a
    learning rate, which the configuration then holds. `relvit fit --config` trains the same again. A trial by
    `fast_dev_run` writes nothing.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing; Lightning's own callback writes the configuration here, which is too early."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after the search for a learning rate, which is the same hook of an earlier callback."""
        if self.config.lr_find:
            self.config.lr_find = False
            self.config.model.lr = pl_module.hparams.lr
        if trainer.fast_dev_run or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        with atomic_write(folder / self.config_filename) as path:
            recorded = self.config.clone()
            recorded.trainer.logger = mask_secrets(recorded.trainer.logger)
            self.parser.save(recorded, path, skip_none=False, multifile=self.multifile)
        command = mask_command(sys.argv, self.config.trainer.logger)
        record_run(folder, command, self.config.seed_everything, trainer)
