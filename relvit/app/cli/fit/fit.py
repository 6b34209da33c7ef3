"""`FitCLI`: `relvit fit`, from options and perhaps a checkpoint to a training and its config.yaml in a run folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.app.cli.errors import UsageError
from relvit.app.cli.fit.refused_options import check_recorded, check_trainer_options
from relvit.app.cli.fit.resumed_options import changed_options, checkpoint_of_epoch_end, fit_options, resume_arguments
from relvit.app.cli.fit.start_and_end import describe_training, report_fit
from relvit.app.cli.mistakes import decided_by_data
from relvit.app.cli.parser import Parser
from relvit.app.cli.secrets import CLASSES, mask_command
from relvit.app.cli.trainer.command_folder import new_folder, read_summary
from relvit.app.cli.trainer.lightning_cli import RelvitCLI, values_of
from relvit.app.cli.trainer.own_data import data_in
from relvit.app.cli.typed_words import Arguments
from relvit.app.data.registry import import_data_module
from relvit.app.training import (
    AtomicCheckpointIO,
    Checkpoint,
    FindLearningRate,
    History,
    Patience,
    RunCheckpoints,
    Telemetry,
    TrainingImages,
    record_run,
)
from relvit.app.training.checkpoints.checkpoint import OF_THE_DATA, Architecture
from relvit.app.training.checkpoints.description import data_arguments
from relvit.app.training.run.processes import leave_processes
from relvit.app.training.run.run_folder import RunLock
from relvit.app.utils.devices import busy_note
from relvit.app.utils.files import atomic_write
from relvit.app.utils.masks import mask_secrets
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.remote import local_file
from relvit.app.utils.shown_text import counted, without_secrets


def fit(
    training: FitCLI,
    *,
    runs: str = "runs",
    save_every: int | None = None,
    patience: int | None = None,
    lr_find: bool = False,
    quiet: bool = False,
) -> None:
    """Train a model on images; the run gets a folder of its own.

    Args:
        training: The data, the model and the options of the trainer.
        save_every: Save a checkpoint after every N optimiser steps, in addition to the end of each epoch.
        patience: Stop after N validations in a row without a better accuracy (or mean average precision, with several
            labels per image).
        lr_find: First find the learning rate with a range test of 100 steps.
        quiet: Print only start, result and errors: neither a progress bar nor a line for each epoch.
    """
    training.run(runs, save_every, patience, lr_find, quiet)


def main(given: Arguments, *, resume: str | None = None, ckpt_path: str | None = None) -> None:
    """Train as the command line says.

    Args:
        given: The options.
        resume: Continue the training in this folder of a run, with the run's configuration and from its last
            checkpoint.
        ckpt_path: Continue the training of a checkpoint in a new folder.
    """
    with ExitStack() as stack:
        training = FitCLI(given, stack, resume, ckpt_path)
        fit(training, **{name: training.config[name] for name in fit.__annotations__ if name in training.config})
    leave_processes()


class FitCLI(RelvitCLI):
    """`relvit fit`: the data determine the model's classes, channels and image size.

    Args:
        given: the command line.
        stack: when it is closed, it removes the local copy of a remote checkpoint, and a new run's folder that is still
            empty.
        resume, ckpt_path: see `main`.
    """

    checkpoint: Checkpoint | None

    def __init__(self, given: Arguments, stack: ExitStack, resume: str | None, ckpt_path: str | None) -> None:
        self.stack: ExitStack = stack
        self.resumes: Path | None = None
        if resume is not None:
            given = resume_arguments(given)
            self.resumes, ckpt_path = Path(resume), given.values["ckpt_path"]
        # This list gets a text for each option that has changed since the training began, such as 'trainer.max_epochs
        # 10 -> 20'.
        self.changed: list[str] = []
        checkpoint = known = None
        if path := ckpt_path:
            # Give Lightning the local copy: given an http address, it reads an earlier download of the same file name,
            # if there is one.
            self.checkpoint_file: Path = stack.enter_context(local_file(path))
            checkpoint = Checkpoint.read(path, self.checkpoint_file)
            if self.checkpoint_file.is_dir():
                last = self.checkpoint_file / "checkpoints" / "last.ckpt"
                raise UsageError(
                    f"--ckpt_path {path} is a folder: give a checkpoint in it, such as {last}, or go on in the same "
                    f"folder by --resume {path}"
                )
            if not checkpoint.resumable:
                raise UsageError(
                    f"{path} holds only weights (as an average does), so no training can resume from it: start a "
                    f"training from these weights with --model.pretrained {path}"
                )
            # Do not take these options from the checkpoint. Class names, and the model's options in `OF_THE_DATA` (such
            # as in_chans and img_size), come from the data; the classes are compared with the checkpoint's classes
            # later. A schedule may be the name of a function to import, so only the user may name it.
            not_of_checkpoint = ("data.class_names", "model.schedule", *(f"model.{name}" for name in OF_THE_DATA))
            # Import a data module of the user's only if the command line or a configuration names it: a checkpoint may
            # come from anybody, so it must not choose which code runs.
            if (asked := data_in(given.words)) is not None:
                import_data_module(asked)
            known = values_of(checkpoint, asked, not_of_checkpoint)
        super().__init__(fit, given, checkpoint, known, RunConfig)

    def add_arguments_to_parser(self, parser: Parser) -> None:
        """Add the options of `fit`, and let the model take classes, channels and image size from the data."""
        super().add_arguments_to_parser(parser)
        for name in OF_THE_DATA:
            parser.link_arguments(f"data.{name}", f"model.{name}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Sequence[str]) -> None:
        """Parse the command line, and remove its checkpoint from the parsed configuration.

        The run's `config.yaml` is written from the parsed configuration. If `config.yaml` named the checkpoint, `relvit
        fit --config config.yaml` would resume from the checkpoint instead of training from the start.
        """
        super().parse_arguments(parser, args)
        self.config.ckpt_path = None

    def check_configuration(self, options: dict[str, Any], config: str) -> None:
        """Refuse a file of `--config` with options of the model that the data decide, or that have no effect there."""
        model = options.get("model")
        # Otherwise the parser would silently drop options that the data decide.
        if isinstance(model, dict) and (given := [name for name in OF_THE_DATA if name in model]):
            raise UsageError(f"unknown option model.{given[0]} in {config}: {decided_by_data(given[0])}")
        super().check_configuration(options, config)

    def run(self, runs: str, save_every: int | None, patience: int | None, lr_find: bool, quiet: bool) -> None:
        """Train, then test the best checkpoint; before writing anything, refuse options that contradict the checkpoint.

        See `fit` for the arguments.
        """
        if self.checkpoint is not None:
            self._check_checkpoint(self.checkpoint, lr_find)
        # Name the model in the saved configuration, even if the user has given only pretrained weights, whose file
        # names the model.
        for name in Architecture._fields:
            self.config.model[name] = self.model.hparams[name]
        check_trainer_options(self.options)
        check_recorded(self.parser, self.config)
        callbacks, history = self._callbacks(runs, save_every, patience, lr_find)
        # Announce the training only in `on_fit_start`: Lightning calls it after all checks that may refuse a
        # checkpoint.
        announce = LambdaCallback(on_fit_start=lambda *_: rank_zero_print(self.announcement))
        with self.running([announce, *callbacks], self.run_folder, history, quiet) as trainer:
            start = time.monotonic()
            self.announcement: str = self._announced()
            path = str(self.checkpoint_file) if self.checkpoint else None
            # With `weights_only`, PyTorch reads only tensors and plain types from the file, and runs no code in it.
            trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True)
            self._report(start)

    def _check_checkpoint(self, checkpoint: Checkpoint, lr_find: bool) -> None:
        """Refuse data and options that contradict the checkpoint from which the training resumes."""
        if lr_find:
            raise UsageError(
                "--lr_find is for a new training; a resumed training keeps its learning rate: leave out --lr_find"
            )
        trained = {"model": checkpoint.model, "data": checkpoint.data} | checkpoint.fit
        now = {"model": self.model.hparams, "data": data_arguments(self.datamodule)} | fit_options(self.config)
        self.changed = changed_options(checkpoint.path, trained, now, self.given.values)

    def _callbacks(
        self, runs: str, save_every: int | None, patience: int | None, lr_find: bool
    ) -> tuple[list[Callback], History | None]:
        """Make or lock the run's folder, set the options that name the folder, and return the training's callbacks.

        A trial with `fast_dev_run` has neither a folder nor callbacks, and None in place of its `History`.
        """
        self.run_folder: Path | None = None
        options = self.options
        if patience is not None and options["limit_val_batches"] == 0:
            raise UsageError(
                f"--patience {patience} has no effect without validations, which --trainer.limit_val_batches 0 leaves "
                "out: leave out one of them"
            )
        if options["fast_dev_run"]:
            options["enable_checkpointing"] = False
            return [], None
        self.run_folder = self.resumes or self.stack.enter_context(new_folder(runs, self.model.hparams.model))
        if rank_zero_only.rank == 0:
            self.stack.callback(RunLock(self.run_folder).release)
        options["default_root_dir"] = self.run_folder
        options["plugins"] = [*(options["plugins"] or ()), AtomicCheckpointIO()]
        self.model.fit_options = fit_options(self.config)
        telemetry = Telemetry()
        monitor = f"val/{self.model.score}"
        self.best: RunCheckpoints = RunCheckpoints(self.run_folder / "checkpoints", save_every, monitor)
        history = History(self.run_folder, telemetry, tensorboard=options["logger"] is None)
        sheet = TrainingImages(self.run_folder / "training_images.png")
        callbacks = [self.best, history, telemetry, sheet]
        if patience is not None:
            callbacks.append(Patience(patience, monitor))
        if lr_find:
            callbacks.append(FindLearningRate())
        return callbacks, history

    def _announced(self) -> str:
        """Return the lines to print when the training begins, after all checks that may refuse the training."""
        data, epochs = self.datamodule, self.trainer.max_epochs
        folder = self.run_folder or "no folder (fast_dev_run, which leaves out --lr_find, --patience and --save_every)"
        text = f"{describe_training(self.model, data)}; files in {folder}\n{self.normalisation}"
        if note := busy_note():
            text = f"{text}\n{note}"
        if self.checkpoint is None:
            return text
        now = (data.batch_size, self.trainer.accumulate_grad_batches, self.trainer.world_size)
        if other := checkpoint_of_epoch_end(self.checkpoint, self.resumes is not None, *now):
            self.checkpoint_file, note = other
            self.checkpoint = Checkpoint.read(self.checkpoint_file)
            text = f"{note}\n{text}"
        limits = {
            "epochs": ("--epochs", epochs, self.checkpoint.finished_epochs()),
            "steps": ("--trainer.max_steps", self.trainer.max_steps, self.checkpoint.finished_steps()),
        }
        for unit, (option, limit, done) in limits.items():
            if limit is None or not 0 <= limit <= done:
                continue
            # If the resumed run was stopped at its end but before its summary was written, only the test, the figures
            # and the summary are left to do. A summary of fewer epochs is from before the training was prolonged.
            if self.resumes is not None and limit == done and read_summary(self.resumes).get(unit) != done:
                text = f"The training is complete; its test, figures and summary are left.\n{text}"
                break
            raise UsageError(
                f"the training of {self.checkpoint.path} has reached its {counted(done, unit[:-1])}: to go on, give "
                f"{option} with a larger number"
            )
        return f"changed since: {', '.join(self.changed)}\n{text}" if self.changed else text

    def _report(self, start: float) -> None:
        """Test the best checkpoint if there are test images, and print the result and commands for the next steps."""
        if self.run_folder is None:
            return
        # `trainer.checkpoint_callback` may be a callback of the user, so use relvit's own callback.
        if self.best.best_model_score is None:
            last = self.best.last_path
            kept = f"; its last one is {last}" if last.exists() else ""
            rank_zero_print(f"The training ended before its first validation: no best checkpoint{kept}.")
            return
        since = self.checkpoint.finished_epochs() if self.checkpoint else 0
        seconds, seed = time.monotonic() - start, self.config.seed_everything
        report_fit(self.trainer, self.best, self.run_folder, seed, seconds, since, same_run=self.resumes is not None)


class RunConfig(SaveConfigCallback):
    """Write `config.yaml` into the run's folder, even if loggers write elsewhere, and add to `run.json`.

    Both files are written after all checks of the training and after `--lr_find`, so that `config.yaml` holds the
    learning rate that was found. `relvit fit --config config.yaml` repeats the training. A trial with `fast_dev_run`
    writes neither file.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing; Lightning's own callback writes the configuration here, which is too early."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write both files after the search for a learning rate, which an earlier callback makes in the same hook.

        `FindLearningRate` searches in its own `on_fit_start`, and comes earlier in the list of callbacks.
        """
        if self.config.lr_find:
            self.config.lr_find = False
            self.config.model.lr = pl_module.hparams.lr
        if trainer.fast_dev_run or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        recorded = self.config.clone()
        for name, value in self.config.items():
            recorded[name] = without_secrets(value)
        for kind in CLASSES:
            recorded.trainer[kind] = mask_secrets(recorded.trainer[kind])
        recorded.data = mask_secrets(recorded.data, trainer.datamodule.public_names())
        with atomic_write(folder / self.config_filename) as path:
            # `parser.save` would write in the encoding of the locale, and `read_config` reads UTF-8.
            path.write_text(self.parser.dump(recorded, skip_none=False), encoding="utf-8")
        command = mask_command(sys.argv, self.config, recorded)
        record_run(folder, command, self.config.seed_everything, trainer)
