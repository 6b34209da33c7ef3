"""`config.yaml` of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from relvit.replacing import replacing


class RunConfig(SaveConfigCallback):
    """Writes the configuration into the run's folder, wherever loggers write, before a training starts.

    And again once `--lr_find` has found a learning rate: then it holds that rate and searches no more. Given to `fit`,
    it trains the same again. Where there is no run, in a trial by `fast_dev_run`, nothing is written.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, save_to_log_dir=False)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning calls this in the main process."""
        if not trainer.fast_dev_run:
            with replacing(Path(trainer.default_root_dir) / self.config_filename) as path:
                self.parser.save(self.config, path, skip_none=False, multifile=self.multifile)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Behind the search, which is the same hook of a callback that comes earlier."""
        if not self.config.lr_find:
            return
        self.config.lr_find = False
        self.config.model.lr = pl_module.hparams.lr
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, "fit")
