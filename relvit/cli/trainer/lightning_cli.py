"""`RelvitCLI`: Lightning's CLI for one command, whose options begin with the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from relvit.cli.arguments import Arguments
from relvit.cli.errors import UsageError
from relvit.cli.parser import Parser
from relvit.cli.trainer.folder import check_runs
from relvit.cli.trainer.normalisation import set_normalisation
from relvit.cli.trainer.options import TRAINER_DEFAULTS, check_numbers
from relvit.data import ImageData
from relvit.training import Checkpoint, ImageClassifier


class RelvitCLI(LightningCLI):
    """Lightning's CLI for one command: it parses the options, and builds the data and the model.

    The trainer is built by `build_trainer`, when the folder of its results is known.

    Args:
        function: its arguments, without the first, are the options beside those of the trainer, the model and the data.
        given: the command line.
        known: the values that options have where the command line does not give them, see `values_of`.
        save_config_callback: writes the configuration of a training.
    """

    def __init__(
        self,
        function: Callable[..., None],
        given: Arguments,
        known: Namespace | None = None,
        save_config_callback: type[SaveConfigCallback] | None = None,
    ) -> None:
        self.function: Callable[..., None] = function
        self.given: Arguments = given
        self.known: Namespace = Namespace() if known is None else known
        self.known.update(given.lists())
        super().__init__(
            ImageClassifier,
            ImageData,
            subclass_mode_data=True,
            parser_class=Parser,
            seed_everything_default=0,
            trainer_defaults=TRAINER_DEFAULTS,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=save_config_callback,
            args=given.words,
            run=False,
        )

    def add_arguments_to_parser(self, parser: Parser) -> None:
        """Add the options of the command's function."""
        parser.add_options_of(self.function)

    def parse_arguments(self, parser: LightningArgumentParser, args: Sequence[str]) -> None:
        """Parse the command line, and refuse numbers and folders that cannot be."""
        self.config: Namespace = parser.parse_args(args, namespace=self.known)
        check_numbers(self.config)
        check_runs(self.config.get("runs"), self.config.trainer.default_root_dir)

    def instantiate_classes(self) -> None:
        """Build the data and the model; refuse two options for one size."""
        self.config_init: Namespace = self.parser.instantiate_classes(self.config)
        self.datamodule: ImageData = self.config_init.data
        self.model: ImageClassifier = self.config_init.model
        if self.datamodule.max_tokens is not None and self.given.values.get("data.img_size") is not None:
            raise UsageError("--data.max_tokens sets the size of native images: give no --img_size beside it")

    def normalise(self, checkpoint: Checkpoint | None) -> str:
        """Normalise the images as given, or else as the weights were trained, and describe it."""
        arguments = self.config.data.get("init_args", {})
        return set_normalisation(self.datamodule, arguments, checkpoint, self.model.pretrained)

    def build_trainer(self, options: Mapping[str, Any], callbacks: Sequence[Callback]) -> Trainer:
        """Build the trainer from its options, with further callbacks behind those of the options."""
        options = {**options, "callbacks": [*options["callbacks"], *callbacks], "logger": options["logger"] or False}
        self.trainer: Trainer = self.instantiate_trainer(**options)
        return self.trainer


def values_of(checkpoint: Checkpoint, asked_data: str | None, without: Collection[str] = ()) -> Namespace:
    """Return the arguments of model and data in a checkpoint, as the values that a parser begins with.

    A file must not choose what is imported: a data module that is none of relvit's has to be asked for.

    Args:
        checkpoint: describes model and data.
        asked_data: the value of `--data`; None: it was not given.
        without: arguments that are left out, such as 'model.img_size'.

    Raises:
        UsageError: the data module was not asked for.
    """
    data, values = checkpoint.data["class_path"], Namespace()
    for name, value in checkpoint.model.items():
        if f"model.{name}" not in without:
            values[f"model.{name}"] = value
    if checkpoint.data_type is not None or data == asked_data:
        arguments = {name: value for name, value in checkpoint.data_args.items() if f"data.{name}" not in without}
        values["data"] = Namespace(class_path=data, init_args=Namespace(arguments))
    elif asked_data is None:
        raise UsageError(f"{checkpoint.path} was trained with the data module {data}: give --data {data}")
    return values
