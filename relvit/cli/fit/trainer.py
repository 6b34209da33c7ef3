"""`relvit fit|validate|test|predict`: the Lightning CLI with run folders and with checkpoints that know their model."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning import Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.cli.arguments import option, without
from relvit.cli.commands.normalisation import set_normalisation
from relvit.cli.commands.predict_paths import asked_paths, data_of_paths
from relvit.cli.errors import UsageError
from relvit.cli.fit.launch import check_processes, environment_of, launched, leave_processes
from relvit.cli.fit.outcome import say, tell_fit, tell_predict, tell_test
from relvit.cli.fit.progress_display import progress_callbacks
from relvit.cli.fit.resume import resumed
from relvit.cli.fit.resume_options import changed_options, fit_options
from relvit.cli.fit.run_config import RunConfig
from relvit.cli.parser import Parser
from relvit.data import ImageData
from relvit.data.modules.by_name import own_data_module
from relvit.evaluation import EvaluationReport, MirrorAverage
from relvit.training import (
    DataRecord,
    DescribeCheckpoint,
    FindLearningRate,
    History,
    ImageClassifier,
    Patience,
    PredictionTable,
    RunCheckpoints,
    RunLock,
    StoppedBySignalError,
    Telemetry,
    TrainingImages,
    WholeCheckpoints,
    ignore_stop_signals,
    new_run_folder,
    remove_if_empty,
)
from relvit.training.checkpoints.checkpoint import check_same_data, check_same_network, data_arguments
from relvit.training.checkpoints.disk import NoRoomError, last_whole
from relvit.training.checkpoints.file import KEY, checkpoint_content
from relvit.training.checkpoints.pretrained import Architecture
from relvit.training.checkpoints.resume import Position
from relvit.training.lightning_internals import OpenLightningCLI
from relvit.training.optim.sharding import check_strategy
from relvit.utils.atomic_write import DISK_ERRORS
from relvit.utils.remote import is_address, local_file

LINKS = ("num_classes", "in_chans", "class_names", "img_size")


def main(command: str, arguments: Sequence[str]) -> None:
    """Run one of the Trainer's methods with command line arguments."""
    with ExitStack() as copies:
        RelvitCLI(command, arguments, copies)
    leave_processes()


class RelvitCLI(OpenLightningCLI):
    """One command. In `fit`, classes, channels and image size flow from the data to the model; the other commands take
    model, classes and transforms from the checkpoint, and explicit flags override them or are refused.

    Args:
        command: the Trainer's method.
        arguments: of the command line.
        copies: keeps the local copy of a checkpoint at a remote address, until it is closed.
    """

    def __init__(self, command: str, arguments: Sequence[str], copies: ExitStack) -> None:
        self.command = command
        self.arguments = list(arguments)
        self.resumes: Path | None = None
        if command == "fit" and (run := option(self.arguments, "--resume")) is not None:
            last, self.arguments = resumed(run, without(self.arguments, "--resume"))
            self.resumes = Path(run)
            self.arguments += ["--ckpt_path", str(last)]
        self.checkpoint_path = option(self.arguments, "--ckpt_path")
        self.paths = asked_paths(self.arguments)
        self.arguments = without(self.arguments, "--paths")
        asks_help = any(argument in ("-h", "--help") or argument.endswith(".help") for argument in self.arguments)
        if command != "fit" and self.checkpoint_path is None and not asks_help:
            raise UsageError(f"no checkpoint given: relvit {command} runs/RUN/checkpoints/best.ckpt")
        self.remembered: dict[str, Any] | None = None
        self.finished_epochs = 0
        # What a training that goes on does otherwise than before.
        self.changed: list[str] = []
        if self.checkpoint_path:
            # Lightning reads it again, and would take an older file of the same name for one at an address of http.
            self.checkpoint_file = copies.enter_context(local_file(self.checkpoint_path))
            checkpoint = checkpoint_content(self.checkpoint_file, self.checkpoint_path)
            self.remembered = checkpoint[KEY]
            if command == "fit":
                if "optimizer_states" not in checkpoint:
                    raise UsageError(
                        f"{self.checkpoint_path} holds weights alone (an average does), with which no training can go "
                        f"on: start one from them with --model.pretrained {self.checkpoint_path}"
                    )
                self.finished_epochs = _finished_epochs(checkpoint)
            data, asked = self.remembered["data"]["class_path"], option(self.arguments, "--data")
            # A file must not choose what is imported.
            if own_data_module(data) is None and asked is None and self.paths is None:
                raise UsageError(f"{self.checkpoint_path} was trained with the data module {data}: give --data {data}")
            self.knows_data = own_data_module(data) is not None or data == asked
            if self.paths is not None:
                self.remembered["data"], self.knows_data = data_of_paths(self.remembered["data"]["init_args"]), True
        self.run_folder: Path | None = None
        # What this process made, and may remove where nothing came of it.
        self.made_folder: Path | None = None
        super().__init__(
            ImageClassifier,
            ImageData,
            subclass_mode_data=True,
            parser_class=Parser,
            seed_everything_default=0,
            trainer_defaults={"max_epochs": 100, "enable_model_summary": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=RunConfig if command == "fit" else None,
        )

    def subcommands(self) -> dict[str, set[str]]:
        """Only the command that runs: each further parser costs a second. And no options that we decide ourselves."""
        return {self.command: OpenLightningCLI.subcommands()[self.command] | {"weights_only", "return_predictions"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options beside those of trainer, model and data, and what flows from the data to the model."""
        if self.command in ("fit", "test", "predict"):
            parser.add_argument("--runs", type=str, default="runs", help="The folder in which a run gets its own.")
        if self.command == "test":
            text = "The images to evaluate: those of train (without augmentation), val or test."
            parser.add_argument("--split", type=Literal["train", "val", "test"], default="test", help=text)
        if self.command in ("test", "predict"):
            text = "Average the probabilities of each image and its mirror image."
            parser.add_argument("--mirror", type=bool, default=False, help=text)
        if self.command == "fit":
            parser.add_argument(
                "--resume",
                type=str | None,
                default=None,
                help="Continue the training in this run's folder, with its configuration.",
            )
            parser.add_argument(
                "--save_every",
                type=int | None,
                default=None,
                help="Save a checkpoint after every so many optimiser steps, besides the one after each epoch.",
            )
            parser.add_argument(
                "--patience",
                type=int | None,
                default=None,
                help="Stop after this number of validations in a row without a better accuracy.",
            )
            parser.add_argument(
                "-q",
                "--quiet",
                action="store_true",
                help="Show no progress, neither a bar nor a line for each epoch: only start, result and errors.",
            )
            parser.add_argument(
                "--lr_find", type=bool, default=False, help="Find the learning rate by a range test of 100 steps first."
            )
            for name in LINKS:
                parser.link_arguments(f"data.{name}", f"model.{name}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: None) -> None:
        """Parse the values of the checkpoint, then those of the user, which override them."""
        first = []
        if self.remembered is not None:
            known = {"model": dict(self.remembered["model"])}
            if self.knows_data:
                data = self.remembered["data"]
                known["data"] = {"class_path": data["class_path"], "init_args": dict(data["init_args"])}
            if self.command == "fit":
                for name in LINKS:
                    known["model"].pop(name, None)
                # Which classes there are now is seen by the images, and compared.
                known.get("data", {"init_args": {}})["init_args"].pop("class_names", None)
            try:
                first = ["--config", json.dumps(known)]
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{self.checkpoint_path} is not a checkpoint of relvit fit: {error}") from error
        self.config = parser.parse_args([self.command, *first, *self.arguments])
        if self.paths is not None:
            # Not by the parser: names of files need not be text.
            self.config[self.command].data.init_args.paths = self.paths
        runs = self.config[self.command].get("runs")
        if runs is not None and is_address(runs):
            raise UsageError(f"--runs {runs} is a remote address: runs are written to folders of this machine alone")
        if self.remembered is not None and self.command == "fit":
            # The configuration that is kept says what is trained, not from where a part of it went on.
            self.config[self.command]["ckpt_path"] = None

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; refuse flags that contradict the checkpoint."""
        if self.remembered is not None and self.command != "fit":
            asked = self.config_value(self.config, "model").as_dict()
            check_same_network(self.checkpoint_path, self.remembered, asked)
        if self.command == "predict" and option(self.arguments, "--data.on_error") is None:
            # Whatever the training did about them: one broken file shall not cost the others their predictions.
            data = self.config_value(self.config, "data").init_args
            if "on_error" in data:
                data.on_error = "skip"
        super().instantiate_classes()
        if self.command == "test":
            self.datamodule.evaluate_on(self.config_value(self.config, "split"))

    def _check_checkpoint(self) -> None:
        """Refuse data and options that contradict the checkpoint; before anything is written."""
        check_same_network(self.checkpoint_path, self.remembered, self.model.hparams)
        check_same_data(self.checkpoint_path, self.remembered, self.datamodule)
        if self.command == "fit":
            if self.config_value(self.config, "lr_find"):
                raise UsageError(
                    "--lr_find starts a training; one that goes on keeps its learning rate: drop that option"
                )
            trained = {name: self.remembered[name] for name in ("model", "data")} | self.remembered.get("fit", {})
            now = {"model": self.model.hparams, "data": data_arguments(self.datamodule)} | self._fit_options()
            self.changed = changed_options(self.checkpoint_path, trained, now, self.arguments)

    def _fit_options(self) -> dict[str, Any]:
        return fit_options(self.config[self.command])

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer with this run's folder, loggers and callbacks."""
        known = self.remembered and self.remembered["data"]["init_args"]
        arguments = self.config_value(self.config, "data").get("init_args", {})
        self.normalisation = set_normalisation(self.datamodule, arguments, known, self.model.hparams.pretrained)
        if self.remembered is not None:
            self._check_checkpoint()
        # So that config.yaml names the model, also where it came from the pretrained weights.
        built = Architecture(*(self.model.hparams[name] for name in Architecture._fields))
        _set(self.config_value(self.config, "model"), built)
        config = {**self.config_value(self.config_init, "trainer"), **kwargs}
        self.launch = launched()
        if config["devices"] == "auto" and self.launch is not None:
            config["devices"], config["num_nodes"] = self.launch.per_node, self.launch.nodes
        check_strategy(config["strategy"])
        plugins = _listed(config["plugins"])
        environment = environment_of(self.launch)
        if environment is not None and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
            plugins.append(environment)
        patience = self.config_value(self.config, "patience") if self.command == "fit" else None
        if patience is not None and patience < 1:
            raise UsageError(f"--patience must be 1 or more, got {patience}")
        callbacks: list[Any] = []
        history: History | None = None
        if self.command == "fit" and not config["fast_dev_run"]:
            self.run_folder = self.resumes or self._new_run_folder(self.model.hparams.model)
            if rank_zero_only.rank == 0:
                self.lock = self._lock(self.run_folder)
            telemetry = Telemetry()
            self.best = RunCheckpoints(self.run_folder / "checkpoints", self.config_value(self.config, "save_every"))
            history = History(self.run_folder, telemetry, tensorboard=config["logger"] is None)
            sheet = TrainingImages(self.run_folder / "training_images.png")
            callbacks = [self.best, DescribeCheckpoint(self._fit_options()), history, telemetry, sheet]
            plugins.append(WholeCheckpoints())
            if patience is not None:
                callbacks.append(Patience(patience))
            if self.config_value(self.config, "lr_find"):
                callbacks.append(FindLearningRate())
            config["default_root_dir"] = self.run_folder
        else:
            config["enable_checkpointing"] = False
        config["plugins"] = plugins or None
        config["logger"] = config["logger"] or False
        if self.command == "predict":
            self.run_folder = self._new_run_folder("predict")
            callbacks = [PredictionTable(self.run_folder / "predictions.csv", self.model.hparams.class_names)]
        if self.command == "test":
            self.run_folder = self._new_run_folder("test")
            callbacks = [EvaluationReport(self.run_folder)]
        if self.command in ("test", "predict") and self.config_value(self.config, "mirror"):
            callbacks.append(MirrorAverage())
        config["callbacks"] = _listed(config["callbacks"])
        callbacks += progress_callbacks(
            config, history, self.command == "fit" and self.config_value(self.config, "quiet")
        )
        return self.make_trainer(config, [*callbacks, DataRecord(self.run_folder)])

    def before_fit(self) -> None:
        """Say what is about to be trained."""
        self.start = time.monotonic()
        model, data = self.model, self.datamodule
        epochs = self.trainer.max_epochs
        if self.checkpoint_path and epochs is not None and 0 <= epochs <= self.finished_epochs:
            raise UsageError(
                f"the training of {self.checkpoint_path} has reached its {self.finished_epochs} epochs: to go on, give "
                f"--epochs with a larger number"
            )
        if self.changed:
            say(f"changed since: {', '.join(self.changed)}")
        size = sum(parameter.numel() for parameter in model.net.parameters()) / 1e6
        say(
            f"{model.hparams.model} ({size:.2f} M parameters), {data.num_classes} classes, "
            f"{data.img_size[0]} x {data.img_size[1]} px x {data.in_chans}, batch {data.batch_size}; "
            f"files in {self.run_folder or 'no folder (fast_dev_run)'}"
        )
        say(self.normalisation)

    def after_fit(self) -> None:
        """Test the best checkpoint where there are test images, and say what came out, where it is and what is next."""
        if self.run_folder is None:
            return
        # Not the trainer's, which may be one of the user's own.
        if self.best.best_model_score is None:
            say("Nothing was trained.")
            return
        since = self.finished_epochs if self.checkpoint_path else 0
        seconds, seed = time.monotonic() - self.start, self.config_value(self.config, "seed_everything")
        tell_fit(self.trainer, self.best, self.run_folder, seed, seconds, since, whole=self.resumes is not None)

    def after_test(self) -> None:
        """Write the numbers, show the classes and say where the rest is."""
        if rank_zero_only.rank == 0:
            tell_test(self.trainer, self.run_folder, self.checkpoint_path)

    def after_predict(self) -> None:
        """Say where the predictions are; fail if there are none."""
        if rank_zero_only.rank == 0:
            tell_predict(self.trainer, self.run_folder)

    def run_subcommand(self, subcommand: str) -> None:
        try:
            check_processes(self.launch, self.trainer)
            super().run_subcommand(subcommand)
        except SystemExit as stop:
            # Told to stop, or Lightning has caught Ctrl-C and is on its way out.
            folder = self.run_folder
            if self.trainer.interrupted and folder and (folder / "checkpoints" / "last.ckpt").is_file():
                why = f"Stopped by {stop.signal.name}" if isinstance(stop, StoppedBySignalError) else "Stopped"
                say(f"{why}. To go on: relvit fit --resume {folder}")
            if isinstance(stop, StoppedBySignalError):
                ignore_stop_signals()
            elif self.trainer.interrupted:
                raise SystemExit(128 + signal.SIGINT) from stop
            raise
        except OSError as error:
            raise self._about_the_disk(error) from error
        finally:
            if self.made_folder:
                remove_if_empty(self.made_folder)

    def subcommand_arguments(self, subcommand: str) -> dict[str, Any]:
        kwargs = super().subcommand_arguments(subcommand)
        # Nothing but tensors and plain types is ever read from a checkpoint.
        kwargs["weights_only"] = True
        if self.checkpoint_path:
            kwargs["ckpt_path"] = str(self.checkpoint_file)
        if subcommand == "predict":
            kwargs["return_predictions"] = False
        return kwargs

    def _about_the_disk(self, error: OSError) -> OSError:
        """The same; where the disk is full, with what is left and what to do about it."""
        if error.errno not in DISK_ERRORS or isinstance(error, NoRoomError) or self.run_folder is None:
            return error
        found = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
        if self.command != "fit":
            return OSError(error.errno, f"{found}: make room, or give another folder than {self.run_folder} (--runs)")
        kept = last_whole(self.run_folder / "checkpoints")
        if kept in found:
            kept = ""
        last = self.run_folder / "checkpoints" / "last.ckpt"
        if last.is_file():
            kept = "; ".join(filter(None, [kept, f"make room, then relvit fit --resume {self.run_folder}"]))
        return OSError(error.errno, f"{found}; {kept}")

    def _lock(self, folder: Path) -> RunLock:
        try:
            return RunLock(folder)
        except BlockingIOError as error:
            raise UsageError(error.strerror) from error
        except OSError as error:
            raise UsageError(f"cannot write into {folder}: {error.strerror}") from error

    def _new_run_folder(self, name: str) -> Path:
        """Make a new folder, in the main process alone; it sends the paths of checkpoints to the others."""
        parent = Path(self.config_value(self.config, "runs"))
        if rank_zero_only.rank != 0:
            return parent
        try:
            self.made_folder = new_run_folder(parent, name)
        except OSError as error:
            reason = f"cannot make a run's folder in {parent}: {error.strerror}"
            raise UsageError(f"{reason}; give another with --runs") from error
        return self.made_folder


def _finished_epochs(checkpoint: dict[str, Any]) -> int:
    try:
        position = Position.read(checkpoint)
        return int(checkpoint["epoch"] + 1 if position is None else position.epoch)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError("the checkpoint does not say how far its training was: it is not one of relvit fit") from error


def _listed(value: Any) -> list[Any]:
    """The same as a list, where None is none."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _set(config: Namespace, architecture: Architecture) -> None:
    for name, value in architecture._asdict().items():
        config[name] = value
