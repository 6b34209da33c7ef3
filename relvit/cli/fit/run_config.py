"""`config.yaml` and `run.json` of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from relvit.training import record_run
from relvit.utils.files import atomic_write


class RunConfig(SaveConfigCallback):
    """Writes the configuration into the run's folder, wherever loggers write, and adds to `run.json`.

    When a training is about to begin: `--lr_find` has found its learning rate, which the configuration then holds, and
    a checkpoint to go on from has been taken. What is refused before leaves the files as they were. Given to `fit`, the
    configuration trains the same again. Where there is no run, in a trial by `fast_dev_run`, nothing is written.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing: here Lightning's own writes."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Behind the search, which is the same hook of a callback that comes earlier."""
        if self.config.lr_find:
            self.config.lr_find = False
            self.config.model.lr = pl_module.hparams.lr
        if trainer.fast_dev_run or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        with atomic_write(folder / self.config_filename) as path:
            self.parser.save(self.config, path, skip_none=False, multifile=self.multifile)
        record_run(folder, sys.argv, self.config.seed_everything, trainer)
