"""`Evaluation`: the classifier and the data of a checkpoint, as the options of a command change them, and a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.cli.aliases import option, without
from relvit.cli.errors import UsageError
from relvit.cli.parser import SHARED, Parser
from relvit.cli.trainer.failures import explained_failures
from relvit.cli.trainer.launch import Launch, PatientLauncher, as_list, check_processes, leave_processes, set_devices
from relvit.cli.trainer.lightning_cli import RelvitCLI, values_of
from relvit.cli.trainer.progress import progress_callbacks
from relvit.data import ImageData
from relvit.models import Reach, set_reach
from relvit.models.sizes.reach import check_reach
from relvit.training import Checkpoint, DataRecord
from relvit.utils.remote import local_file

# Options of the model that change how it is evaluated, and not what it is.
OF_EVALUATION = ("compile", "channels_last")


class NamedImages(NamedTuple):
    """Images that the command line names in the place of those that a checkpoint was trained with.

    Attributes:
        data: their data module.
        arguments: of the data module, which has all others in common with the checkpoint's.
        without: an argument of that name that the two data modules have, and that is not taken over.
    """

    data: type[ImageData]
    arguments: dict[str, Any]
    without: str

    def instead_of(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with these images, of the same transforms and classes."""
        shared = set(self.data.argument_names()) - {self.without}
        known = {name: value for name, value in checkpoint.data_args.items() if name in shared}
        return replace(checkpoint, data={"class_path": self.data.__name__, "init_args": known | self.arguments})


def evaluate(
    function: Callable[..., None],
    arguments: Sequence[str],
    images: NamedImages | None = None,
    data_defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run `relvit validate`, `test` or `predict`.

    Args:
        function: runs the command. Its first argument is the `Evaluation`, the others are the command's own options.
        arguments: the command line, in the form '--name=value'.
        images: those to use; None: those of the checkpoint, or of the options of the data.
        data_defaults: options of the data that the command sets, whatever the training had, where the user does not.
    """
    path = option(arguments, "--ckpt_path")
    with ExitStack() as copies:
        checkpoint = file = known = None
        if path:
            # Lightning reads it again, and would take an older file of the same name for one at an address of http.
            file = copies.enter_context(local_file(path))
            checkpoint, asked = Checkpoint.read(path, file), option(arguments, "--data")
            if images is not None:
                checkpoint, asked = images.instead_of(checkpoint), images.data.__name__
            known = values_of(checkpoint, asked)
        elif not any(argument.partition("=")[0].endswith("help") for argument in arguments):
            raise UsageError(f"no checkpoint given: relvit {function.__name__} runs/RUN/checkpoints/best.ckpt")
        evaluation = Evaluation(function, checkpoint, file, without(arguments, "--ckpt_path"), known, data_defaults)
        names = (name for name in function.__annotations__ if name in evaluation.config_init)
        function(evaluation, **{name: evaluation.config_init[name] for name in names})
    leave_processes()


class Evaluation(RelvitCLI):
    """The classifier and the data of a checkpoint, as the options of a command change them.

    Attributes:
        checkpoint: as it was read, with the data module that the command asks for.
        model: the classifier; its weights are loaded when it runs.
        datamodule: the images.

    Args:
        function: runs the command; its signature has the command's own options.
        checkpoint: None: only the help is asked for.
        file: the local file of the checkpoint.
        arguments: the command line, without the checkpoint.
        known: the values of the checkpoint.
        data_defaults: see `evaluate`.
    """

    def __init__(
        self,
        function: Callable[..., None],
        checkpoint: Checkpoint | None,
        file: Path | None,
        arguments: Sequence[str],
        known: Namespace | None,
        data_defaults: Mapping[str, Any],
    ) -> None:
        self.function: Callable[..., None] = function
        self.checkpoint: Checkpoint | None = checkpoint
        self.file: Path | None = file
        self.data_defaults: Mapping[str, Any] = data_defaults
        super().__init__(arguments, known)

    def add_arguments_to_parser(self, parser: Parser) -> None:
        """Add the options of the command, which are the arguments of its function."""
        parser.add_argument("--ckpt_path", type=str, help=SHARED["ckpt_path"])
        parser.add_options_of(self.function, skip={"evaluation"})

    def before_instantiate_classes(self) -> None:
        """Refuse other options of the model than the training's, and set what the command has of its own."""
        names = (name for name in self.checkpoint.model if name not in OF_EVALUATION)
        self.checkpoint.check_network(self.config.model.as_dict(), names)
        arguments = self.config.data.init_args
        for name, value in self.data_defaults.items():
            if name in arguments and option(self.arguments, f"--data.{name}") is None:
                arguments[name] = value

    def instantiate_classes(self) -> None:
        """Build the data and the model, and refuse options that contradict the checkpoint or this machine."""
        super().instantiate_classes()
        self.normalise(self.checkpoint)
        self.checkpoint.check_network(self.model.hparams)
        self.checkpoint.check_data(self.datamodule)
        self.options: dict[str, Any] = {**self.config_init.trainer}
        self.launch: Launch | None = set_devices(self.options)

    def set_reach(self, reach: Reach) -> None:
        """Choose how attention works at other sizes than in training."""
        check_reach(reach, self.datamodule.shape.fixed, self.checkpoint.path)
        if reach != "trained":
            set_reach(self.model.net, reach, self.checkpoint.transforms().img_size)

    def run(
        self,
        callbacks: Sequence[Callback] = (),
        folder: Path | None = None,
        report: Callable[[Trainer], None] = lambda trainer: None,
        **options: Any,
    ) -> None:
        """Run the Trainer's method of the command's name with the checkpoint's weights.

        Args:
            callbacks: compute the results.
            folder: for the results; None: they are only printed.
            report: is called in the main process at the end.
            options: further arguments of the method.
        """
        command = self.function.__name__
        trainer_options = self.options | {
            "enable_checkpointing": False,
            "callbacks": as_list(self.options["callbacks"]),
        }
        shown = progress_callbacks(trainer_options, None, quiet=False)
        trainer = self.build_trainer(trainer_options, [PatientLauncher(), *callbacks, *shown, DataRecord(folder)])
        with explained_failures(command, trainer, folder):
            check_processes(self.launch, trainer)
            method = getattr(trainer, command)
            # Nothing but tensors and plain types is ever read from a checkpoint.
            method(self.model, self.datamodule, ckpt_path=str(self.file), weights_only=True, **options)
            if rank_zero_only.rank == 0:
                report(trainer)


def refuse_other_images(arguments: Sequence[str], others: Sequence[str], given: str) -> None:
    """Refuse options that name images where `given` names them already."""
    for other in others:
        if (value := option(arguments, other)) is not None:
            raise UsageError(f"{other} {value} and {given} both name the images: give one of them")
