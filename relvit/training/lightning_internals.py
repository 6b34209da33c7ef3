"""Private attributes of Lightning (with a leading underscore): the only file of the package that uses them.

A new minor version of Lightning may change them: `tests/training/test_lightning_internals.py` then fails first.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import subprocess_script


def attached_trainer(module: LightningModule) -> Trainer | None:
    """Return the trainer of a module, or None where `module.trainer` would raise an error."""
    return module._trainer


def cluster_environment(trainer: Trainer) -> ClusterEnvironment:
    """Return the environment (torchrun, Slurm, ...) that started the trainer's processes."""
    return trainer._accelerator_connector.cluster_environment


class PatientObserver(_ChildProcessObserver):
    """Lightning's thread that kills all processes where one has failed, but gives the main one a minute to end first.

    It then closes what it writes, draws its curves and returns the exit status of the process that failed.
    """

    SECONDS = 60

    def _terminate_all(self) -> None:
        time.sleep(self.SECONDS)
        super()._terminate_all()


def observe_patiently() -> None:
    """Let trainers from now on observe the processes that they start by `PatientObserver`."""
    subprocess_script._launch_process_observer = lambda processes: PatientObserver(os.getpid(), processes).start()


def started_processes(trainer: Trainer) -> Sequence[subprocess.Popen[bytes]]:
    """Return the other processes that the trainer has started; none where they were started from outside."""
    return getattr(trainer.strategy.launcher, "procs", ())


def training_batches_done(trainer: Trainer) -> bool:
    """Check whether this training batch is the last one of the epoch, or of the training where `max_steps` ends it."""
    return trainer.fit_loop.epoch_loop._is_training_done


def stepped_within_epoch(trainer: Trainer) -> bool:
    """Check whether this training batch made an optimiser step and further batches follow in its epoch."""
    loop = trainer.fit_loop.epoch_loop
    return not loop._should_accumulate() and not loop._num_ready_batches_reached()


def validation_due(trainer: Trainer) -> bool:
    """Check whether a validation follows the training batch that was processed last."""
    fit_loop = trainer.fit_loop
    return fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)


def resume_before_validation(trainer: Trainer, skip: bool) -> None:
    """Prepare a resumed training for passing a validation that is due once more; `skip` if it has been done already."""
    loop = trainer.fit_loop.epoch_loop
    # The loop counts the step that led to this validation a second time.
    loop._batches_that_stepped -= 1
    if not skip:
        loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


def shard_over_all_devices(strategy: ModelParallelStrategy) -> None:
    """Make a strategy's data-parallel group as large as the world: 'auto' would give it one process per machine."""
    strategy._data_parallel_size = strategy.num_nodes * strategy.num_processes


class EpochTitleProgressBar(RichProgressBar):
    """Lightning's progress bar, whose subclasses return the text in front of the bar by `epoch_title`."""

    def _get_train_description(self, current_epoch: int) -> str:
        return self.epoch_title(current_epoch)


class OpenLightningCLI(LightningCLI):
    """Lightning's CLI, whose subclasses may extend how a subcommand runs and with which arguments."""

    def config_value(self, config: Any, key: str, default: Any = None) -> Any:
        """Return an option of the subcommand that runs."""
        return self._get(config, key, default)

    def make_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        """Build the trainer from its options."""
        return self._instantiate_trainer(config, callbacks)

    def run_subcommand(self, subcommand: str) -> None:
        """Call the Trainer's method of that name."""
        super()._run_subcommand(subcommand)

    def subcommand_arguments(self, subcommand: str) -> dict[str, Any]:
        """Return the keyword arguments of the Trainer's method."""
        return super()._prepare_subcommand_kwargs(subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_subcommand(subcommand)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return self.subcommand_arguments(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let a checkpoint's hyper-parameters silently win over the command line."""
