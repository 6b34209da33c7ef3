"""`Evaluation`: the classifier and the data of a checkpoint, as the options of a command change them, and a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.cli.arguments import Arguments
from relvit.cli.errors import UsageError
from relvit.cli.parser import SHARED, Parser
from relvit.cli.trainer.lightning_cli import RelvitCLI, values_of
from relvit.models import Reach, set_reach
from relvit.models.sizes.reach import check_reach
from relvit.training import Checkpoint
from relvit.training.run.launch import leave_processes
from relvit.utils.remote import local_file

# Options of the model that change how it is evaluated, and not what it is.
OF_EVALUATION = ("compile", "channels_last")


def evaluate(
    function: Callable[..., None],
    given: Arguments,
    with_images: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint,
) -> None:
    """Run `relvit validate`, `test` or `predict`.

    Args:
        function: runs the command. Its first argument is the `Evaluation`, the others are the command's own options.
        given: the command line.
        with_images: returns the checkpoint with the images that the command uses.

    Raises:
        UsageError: no checkpoint is given.
    """
    path = given.values.get("ckpt_path")
    if path is None:
        raise UsageError(f"no checkpoint given: relvit {function.__name__} runs/RUN/checkpoints/best.ckpt")
    # Lightning reads the checkpoint again, and would take an older file of the same name for one at an http address.
    with local_file(path) as file:
        read = Checkpoint.read(path, file)
        checkpoint, asked = with_images(read), given.values.get("data")
        if checkpoint.data["class_path"] != read.data["class_path"]:
            # The command has chosen another data module, and not the file.
            asked = checkpoint.data["class_path"]
        evaluation = Evaluation(function, given, checkpoint, file, asked)
        names = (name for name in function.__annotations__ if name in evaluation.config_init)
        function(evaluation, **{name: evaluation.config_init[name] for name in names})
    leave_processes()


class Evaluation(RelvitCLI):
    """The classifier and the data of a checkpoint, as the options of a command change them.

    Args:
        function: runs the command; its signature has the command's own options.
        given: the command line.
        checkpoint: with the images that the command uses; it has the values of options that are not given.
        file: the local file of the checkpoint.
        asked: the data module that the command or its user asks for.
    """

    checkpoint: Checkpoint

    def __init__(
        self, function: Callable[..., None], given: Arguments, checkpoint: Checkpoint, file: Path, asked: str | None
    ) -> None:
        self.file: Path = file
        super().__init__(function, given, checkpoint, values_of(checkpoint, asked))

    def add_arguments_to_parser(self, parser: Parser) -> None:
        """Add the options of the command, which are the arguments of its function."""
        parser.add_argument("--ckpt_path", type=str, help=SHARED["ckpt_path"])
        super().add_arguments_to_parser(parser)

    def before_instantiate_classes(self) -> None:
        """Refuse other options of the model than the training's."""
        names = (name for name in self.checkpoint.model if name not in OF_EVALUATION)
        self.checkpoint.check_network(self.config.model.as_dict(), names)

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
        self.options["enable_checkpointing"] = False
        with self.running(callbacks, folder) as trainer:
            method = getattr(trainer, self.function.__name__)
            # Nothing but tensors and plain types is ever read from a checkpoint.
            method(self.model, self.datamodule, ckpt_path=str(self.file), weights_only=True, **options)
            if rank_zero_only.rank == 0:
                report(trainer)


def refuse_other_images(given: Arguments, others: Sequence[str], named: str) -> None:
    """Refuse options that name images where `named` names them already."""
    for other in others:
        if (value := given.values.get(other)) is not None:
            raise UsageError(f"--{other} {value} and {named} both name the images: give one of them")
