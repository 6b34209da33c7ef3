"""`RelvitCLI`: from options and a checkpoint to Lightning's Trainer, the model, the data and the callbacks."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.cli.aliases import as_yaml, option, without
from relvit.cli.errors import UsageError
from relvit.cli.fit.callbacks import Announcement, RunConfig, progress_callbacks
from relvit.cli.fit.launch import (
    Launch,
    PatientLauncher,
    check_devices,
    check_processes,
    environment_of,
    explain_lost_process,
    launched,
    leave_processes,
)
from relvit.cli.fit.lightning_cli import OpenLightningCLI
from relvit.cli.fit.normalisation import set_normalisation
from relvit.cli.fit.options import STEP_MAPS, TRAINER_DEFAULTS, add_own_options, check_numbers
from relvit.cli.fit.other_images import asked_paths, data_of_paths, data_of_robustness
from relvit.cli.fit.outcome import describe_training, report_fit, report_predict, report_test
from relvit.cli.fit.resumed_options import changed_options, checkpoint_of_epoch_end, fit_options, resume_arguments
from relvit.cli.fit.start_run import check_runs, explain_full_disk, lock_run_folder, make_run_folder
from relvit.cli.parser import Parser
from relvit.data import ImageData
from relvit.evaluation import EvaluationReport, MirrorAverage, MultiLabelReport, RestrictedClasses
from relvit.models import set_reach
from relvit.models.sizes.reach import check_native_reach
from relvit.training import (
    AtomicCheckpointIO,
    Checkpoint,
    DataRecord,
    DescribeCheckpoint,
    FindLearningRate,
    History,
    ImageClassifier,
    Patience,
    PredictionTable,
    RunCheckpoints,
    StoppedBySignalError,
    Telemetry,
    TrainingImages,
    ignore_stop_signals,
    remove_if_empty,
)
from relvit.training.checkpoints.checkpoint import Architecture, data_arguments
from relvit.training.optim.sharding import check_strategy
from relvit.training.run.folder import RunLock, missing_folders
from relvit.utils.cores import busy_note
from relvit.utils.progress import rank_zero_print
from relvit.utils.remote import local_file

LINKS = ("num_classes", "in_chans", "class_names", "img_size", "multi_label")


def main(command: str, arguments: Sequence[str]) -> None:
    """Run one of the Trainer's methods with command line arguments."""
    with ExitStack() as copies:
        RelvitCLI(command, arguments, copies)
    leave_processes()


class RelvitCLI(OpenLightningCLI):
    """Lightning's CLI for one of the Trainer's methods.

    In `fit`, classes, channels and image size flow from the data to the model; the other commands take model, classes
    and transforms from the checkpoint, and explicit flags override them or are refused.

    Args:
        command: the Trainer's method.
        arguments: of the command line.
        copies: keeps the local copy of a checkpoint at a remote address, until it is closed.
    """

    def __init__(self, command: str, arguments: Sequence[str], copies: ExitStack) -> None:
        self.command = command
        self.arguments: list[str] = list(arguments)
        self.resumes: Path | None = None
        if command == "fit" and (run := option(self.arguments, "--resume")) is not None:
            self.arguments = resume_arguments(run, without(self.arguments, "--resume"))
            self.resumes = Path(run)
        self.paths: list[str] | None = asked_paths(self.arguments)
        self.arguments = without(self.arguments, "--paths")
        self.checkpoint_path: str | None = option(self.arguments, "--ckpt_path")
        self.checkpoint: Checkpoint | None = None
        # Options in which a training that goes on differs from before.
        self.changed: list[str] = []
        if self.checkpoint_path:
            # Lightning reads it again, and would take an older file of the same name for one at an address of http.
            self.checkpoint_file: Path = copies.enter_context(local_file(self.checkpoint_path))
            self.checkpoint = self._read_checkpoint()
        elif command != "fit" and not any(argument.partition("=")[0].endswith("help") for argument in self.arguments):
            raise UsageError(f"no checkpoint given: relvit {command} runs/RUN/checkpoints/best.ckpt")
        self.run_folder: Path | None = None
        # What this process made, and may remove where it stays empty.
        self.made_folder: Path | None = None
        try:
            super().__init__(
                ImageClassifier,
                ImageData,
                subclass_mode_data=True,
                parser_class=Parser,
                seed_everything_default=0,
                trainer_defaults=TRAINER_DEFAULTS,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                save_config_callback=RunConfig if command == "fit" else None,
            )
        finally:
            if self.made_folder:
                remove_if_empty(self.made_folder, self.made_parents)

    def _read_checkpoint(self) -> Checkpoint:
        path = self.checkpoint_path
        checkpoint = Checkpoint.read(path, self.checkpoint_file)
        if self.command == "fit" and not checkpoint.resumable:
            raise UsageError(
                f"{path} holds weights alone (an average does), with which no training can go on: start one from them "
                f"with --model.pretrained {path}"
            )
        self.knows_data: bool = True
        if self.paths is not None:
            return data_of_paths(checkpoint)
        if option(self.arguments, "--robustness") is not None:
            return data_of_robustness(checkpoint, self.arguments)
        data, asked = checkpoint.data["class_path"], option(self.arguments, "--data")
        # A file must not choose what is imported.
        if checkpoint.data_type is None and asked is None:
            raise UsageError(f"{path} was trained with the data module {data}: give --data {data}")
        self.knows_data = checkpoint.data_type is not None or data == asked
        return checkpoint

    def subcommands(self) -> dict[str, set[str]]:
        """Return only the command that runs, as each parser costs a second, without options that relvit sets itself."""
        return {self.command: OpenLightningCLI.subcommands()[self.command] | {"weights_only", "return_predictions"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options beside those of trainer, model and data, and link what flows from the data to the model."""
        add_own_options(parser, self.command)
        if self.command == "fit":
            for name in LINKS:
                parser.link_arguments(f"data.{name}", f"model.{name}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: None) -> None:
        """Parse the values of the checkpoint, then those of the user, which override them."""
        first = []
        if self.checkpoint is not None:
            model, data = dict(self.checkpoint.model), dict(self.checkpoint.data_args)
            if self.command == "fit":
                # The classes are found in the images, and compared.
                for name in LINKS:
                    model.pop(name, None)
                data.pop("class_names", None)
            known: dict[str, Any] = {"model": model}
            if self.knows_data:
                known["data"] = {"class_path": self.checkpoint.data["class_path"], "init_args": data}
            try:
                first = [f"--config={as_yaml(known)}"]
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{self.checkpoint_path} is not a checkpoint of relvit fit: {error}") from error
        self.config: Namespace = parser.parse_args([self.command, *first, *self.arguments])
        if self.paths is not None:
            # Not by the parser: names of files need not be text.
            self.config[self.command].data.init_args.paths = self.paths
        check_numbers(self.config[self.command])
        check_runs(self.config[self.command].get("runs"), self.config[self.command].trainer.default_root_dir)
        # The configuration that is kept says what is trained, not from where a part of it went on; and Lightning would
        # let the hyper-parameters of a checkpoint that it finds here silently win over the command line.
        self.resumed_file: str | None = self.config[self.command].ckpt_path
        self.config[self.command].ckpt_path = None

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; refuse flags that contradict the checkpoint."""
        if self.checkpoint is not None and self.command != "fit":
            self.checkpoint.check_network(self.config_value(self.config, "model").as_dict())
        if self.command == "predict" and option(self.arguments, "--data.on_error") is None:
            # Whatever the training did about them: one broken file shall not cost the others their predictions.
            data = self.config_value(self.config, "data").init_args
            if "on_error" in data:
                data.on_error = "skip"
        super().instantiate_classes()
        if self.datamodule.max_tokens is not None and option(self.arguments, "--data.img_size") is not None:
            raise UsageError("--data.max_tokens sets the size of native images: give no --img_size beside it")
        if self.command == "test":
            split = self.config_value(self.config, "split")
            if (reason := self.datamodule.missing(split)) and self.datamodule.missing("val") is None:
                raise UsageError(f"{reason}; or test on the images of val, by --split val")
            self.datamodule.evaluate_on(split)

    def _check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuse data and options that contradict the checkpoint; before anything is written."""
        checkpoint.check_network(self.model.hparams)
        checkpoint.check_data(self.datamodule)
        if self.command != "fit":
            if (reach := self.config_value(self.config, "reach")) != "trained":
                if self.datamodule.native:
                    check_native_reach(reach, str(self.checkpoint_path))
                set_reach(self.model.net, reach, checkpoint.transforms().img_size)
            return
        if self.config_value(self.config, "lr_find"):
            raise UsageError("--lr_find starts a training; one that goes on keeps its learning rate: drop that option")
        data = checkpoint.data
        # Options that are newer than the checkpoint had what is their default now.
        known = {**self.datamodule.argument_defaults(), **data["init_args"]}
        trained = {"model": checkpoint.model, "data": {**data, "init_args": known}} | checkpoint.fit
        now = {"model": self.model.hparams, "data": data_arguments(self.datamodule)} | fit_options(self.config.fit)
        self.changed = changed_options(self.checkpoint_path, trained, now, self.arguments)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with this run's folder, loggers and callbacks."""
        arguments = self.config_value(self.config, "data").get("init_args", {})
        self.normalisation: str = set_normalisation(self.datamodule, arguments, self.checkpoint, self.model.pretrained)
        if self.checkpoint is not None:
            self._check_checkpoint(self.checkpoint)
        # So that config.yaml names the model, also where it came from the pretrained weights.
        for name in Architecture._fields:
            self.config_value(self.config, "model")[name] = self.model.hparams[name]
        config = {**self.config_value(self.config_init, "trainer"), **kwargs}
        check_devices(config["accelerator"], config["devices"])
        check_strategy(config["strategy"])
        self.launch: Launch | None = launched()
        if config["devices"] == "auto" and self.launch is not None:
            config["devices"], config["num_nodes"] = self.launch.per_node, self.launch.nodes
        plugins = _as_list(config["plugins"])
        environment = environment_of(self.launch)
        if environment is not None and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
            plugins.append(environment)
        config["callbacks"] = _as_list(config["callbacks"])
        history: History | None = None
        if self.command != "fit" or config["fast_dev_run"]:
            config["enable_checkpointing"] = False
            callbacks = self._evaluation_callbacks()
        else:
            callbacks, history = self._fit_callbacks(tensorboard=config["logger"] is None)
            plugins.append(AtomicCheckpointIO())
            config["default_root_dir"] = self.run_folder
        config["plugins"] = plugins or None
        config["logger"] = config["logger"] or False
        callbacks += progress_callbacks(
            config, history, self.command == "fit" and self.config_value(self.config, "quiet")
        )
        self.announcement: Announcement = Announcement()
        own = [PatientLauncher(), self.announcement, *callbacks, DataRecord(self.run_folder)]
        return self.make_trainer(config, own)

    def _fit_callbacks(self, tensorboard: bool) -> tuple[list[Callback], History]:
        """Make or lock the run's folder; return what trains in it."""
        options = self.config.fit
        self.run_folder = self.resumes or self._new_run_folder(self.model.hparams.model)
        if rank_zero_only.rank == 0:
            self.lock: RunLock = lock_run_folder(self.run_folder)
        telemetry = Telemetry()
        monitor = f"val/{self.model.score}"
        self.best: RunCheckpoints = RunCheckpoints(self.run_folder / "checkpoints", options.save_every, monitor)
        history = History(self.run_folder, telemetry, tensorboard=tensorboard)
        sheet = TrainingImages(self.run_folder / "training_images.png")
        callbacks = [self.best, DescribeCheckpoint(fit_options(options)), history, telemetry, sheet]
        if options.patience is not None:
            callbacks.append(Patience(options.patience, monitor))
        if options.lr_find:
            callbacks.append(FindLearningRate())
        return callbacks, history

    def _evaluation_callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = []
        if self.command in ("test", "predict"):
            step_maps = self.command == "predict" and self.config_value(self.config, "step_maps")
            if step_maps and not getattr(self.model.net, "counts_steps", False):
                raise UsageError(f"--step_maps is not for {self.model.hparams.model}: it is {STEP_MAPS}")
            self.run_folder = self._new_run_folder(self.command)
            if self.command == "test":
                report = EvaluationReport if self.model.thresholds is None else MultiLabelReport
                callbacks.append(report(self.run_folder))
            else:
                table = self.run_folder / "predictions.csv"
                callbacks.append(PredictionTable(table, self.model.hparams.class_names, step_maps))
            if self.config_value(self.config, "mirror"):
                callbacks.append(MirrorAverage())
            if self.command == "test" and self.config_value(self.config, "robustness") is not None:
                callbacks.append(RestrictedClasses())
        return callbacks

    def _new_run_folder(self, name: str) -> Path:
        """Make a new folder, in the main process alone; it sends the paths of checkpoints to the others."""
        runs = self.config_value(self.config, "runs")
        if rank_zero_only.rank != 0:
            return Path(runs)
        self.made_parents: list[Path] = missing_folders(Path(runs))
        self.made_folder = make_run_folder(runs, name)
        return self.made_folder

    def before_fit(self) -> None:
        """Choose what is announced when the training begins, after everything that may refuse it."""
        self.start: float = time.monotonic()
        data, epochs = self.datamodule, self.trainer.max_epochs
        folder = self.run_folder or "no folder (fast_dev_run)"
        text = f"{describe_training(self.model, data)}; files in {folder}\n{self.normalisation}"
        if note := busy_note():
            text = f"{text}\n{note}"
        self.announcement.text = text
        if self.checkpoint is None:
            return
        now = (data.batch_size, self.trainer.accumulate_grad_batches, self.trainer.world_size)
        if other := checkpoint_of_epoch_end(self.checkpoint, self.resumes is not None, *now):
            self.checkpoint_file, note = other
            self.checkpoint = Checkpoint.read(self.checkpoint_file)
            text = f"{note}\n{text}"
        finished = self.checkpoint.finished_epochs()
        if self._lacks_its_end(epochs, finished):
            text = f"The training is complete; its test, figures and summary are left.\n{text}"
        elif epochs is not None and 0 <= epochs <= finished:
            raise UsageError(
                f"the training of {self.checkpoint_path} has reached its {finished} epochs: to go on, give --epochs "
                "with a larger number"
            )
        if self.changed:
            text = f"changed since: {', '.join(self.changed)}\n{text}"
        self.announcement.text = text

    def _lacks_its_end(self, epochs: int | None, finished: int) -> bool:
        """Whether a run that is resumed was ended after its last epoch and before its summary."""
        return self.resumes is not None and epochs == finished and not (self.resumes / "summary.json").exists()

    def after_fit(self) -> None:
        """Test the best checkpoint where there are test images, and print the result and the commands to go on."""
        if self.run_folder is None:
            return
        # Not the trainer's, which may be one of the user's own.
        if self.best.best_model_score is None:
            last = self.best.last_path
            kept = f"; its last one is {last}" if last.exists() else ""
            rank_zero_print(f"The training ended before its first validation: no best checkpoint{kept}.")
            return
        since = self.checkpoint.finished_epochs() if self.checkpoint else 0
        seconds, seed = time.monotonic() - self.start, self.config_value(self.config, "seed_everything")
        report_fit(self.trainer, self.best, self.run_folder, seed, seconds, since, same_run=self.resumes is not None)

    def after_test(self) -> None:
        if rank_zero_only.rank == 0:
            report_test(self.trainer, self.run_folder, self.checkpoint_path, self.config_value(self.config, "reach"))

    def after_predict(self) -> None:
        if rank_zero_only.rank == 0:
            report_predict(self.trainer, self.run_folder)

    def run_subcommand(self, subcommand: str) -> None:
        try:
            check_processes(self.launch, self.trainer)
            super().run_subcommand(subcommand)
        except SystemExit as stop:
            # A signal, or Lightning has caught Ctrl-C and is on its way out.
            if self.trainer.interrupted and self._can_resume():
                why = f"Stopped by {stop.signal.name}" if isinstance(stop, StoppedBySignalError) else "Stopped"
                rank_zero_print(f"{why}. To go on: relvit fit --resume {self.run_folder}")
            if isinstance(stop, StoppedBySignalError):
                ignore_stop_signals()
            elif self.trainer.interrupted:
                raise SystemExit(128 + signal.SIGINT) from stop
            raise
        except RuntimeError as error:
            hint = f"; to go on: relvit fit --resume {self.run_folder}" if self._can_resume() else ""
            raise explain_lost_process(error, self.trainer, hint) from error
        except OSError as error:
            raise explain_full_disk(error, self.command, self.run_folder) from error

    def _can_resume(self) -> bool:
        return self.run_folder is not None and (self.run_folder / "checkpoints" / "last.ckpt").is_file()

    def subcommand_arguments(self, subcommand: str) -> dict[str, Any]:
        kwargs = super().subcommand_arguments(subcommand)
        # Nothing but tensors and plain types is ever read from a checkpoint.
        kwargs["weights_only"] = True
        # Only a configuration names a checkpoint that was not read here.
        kwargs["ckpt_path"] = str(self.checkpoint_file) if self.checkpoint_path else self.resumed_file
        if subcommand == "predict":
            kwargs["return_predictions"] = False
        return kwargs


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
