"""`config.yaml` of a run."""

from __future__ import annotations

from pathlib import Path

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback


class RunConfig(SaveConfigCallback):
    """Writes the configuration before a training starts, and again once `--lr_find` has found a learning rate.

    Then it holds that rate and searches no more: given to `fit`, it trains the same again.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Behind the search, which is the same hook of a callback that comes earlier."""
        if not self.config.lr_find:
            return
        self.config.lr_find = False
        self.config.model.lr = pl_module.hparams.lr
        if trainer.is_global_zero:
            path = Path(trainer.log_dir) / self.config_filename
            self.parser.save(self.config, str(path), skip_none=False, overwrite=True, multifile=self.multifile)
