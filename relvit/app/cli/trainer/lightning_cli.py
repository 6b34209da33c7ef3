"""Lightning's CLI for commands that run a Trainer, with relvit's defaults (100 epochs); `Evaluation` of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.app.cli.config_text import read_config
from relvit.app.cli.errors import UsageError
from relvit.app.cli.parser import Parser
from relvit.app.cli.trainer.command_folder import check_runs, explained_failures
from relvit.app.cli.trainer.own_data import data_in
from relvit.app.cli.typed_words import Arguments
from relvit.app.data import ImageData
from relvit.app.data.modules.base import Split
from relvit.app.data.recorded_arguments import transforms_of
from relvit.app.data.registry import import_data_module
from relvit.app.evaluation.exported import ExportedClassifier
from relvit.app.training import Checkpoint, DataRecord, History, ImageClassifier
from relvit.app.training.base_classifier import BaseClassifier
from relvit.app.training.callbacks.progress_bar import progress_callbacks
from relvit.app.training.checkpoints.normalisation import set_normalisation
from relvit.app.training.run.processes import (
    Launch,
    PatientLauncher,
    as_list,
    check_processes,
    leave_processes,
    set_devices,
)
from relvit.app.utils.files import is_exported
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.remote import local_file
from relvit.app.utils.shown_text import cut, undecoded
from relvit.models import Reach
from relvit.utils.ranges import Range

# A user may change these options of a checkpoint's model, because they change how the model is computed, but not the
# model itself.
OF_EVALUATION = ("compile", "channels_last")
# These defaults differ from Lightning's.
TRAINER_DEFAULTS: dict[str, Any] = {"max_epochs": 100, "enable_model_summary": False}
# jsonargparse copies a whole list for each item of the list. So if a list has more than this number of texts,
# jsonargparse gets only the first text.
LONG = 100
# relvit reads these options before it parses files of `--config`, so only the command line can give them.
BEFORE_FILES = ("resume", "ckpt_path", "paths", "robustness")

# relvit checks the numbers of these options, because Lightning accepts any number or does not name the option in its
# error message.
_RANGES = {
    Range(1): (
        *("max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "num_nodes"),
        "check_val_every_n_epoch",
    ),
    Range(0, above=True): ("limit_train_batches", "limit_test_batches", "limit_predict_batches", "val_check_interval"),
    Range(0): (
        *("gradient_clip_val", "overfit_batches", "limit_val_batches", "log_every_n_steps"),
        "reload_dataloaders_every_n_epochs",
    ),
    Range(-1): ("num_sanity_val_steps",),
}
RANGES: dict[str, Range] = {f"trainer.{name}": found for found, names in _RANGES.items() for name in names}
RANGES |= {"seed_everything": Range(0, 2**32 - 1), "save_every": Range(1), "patience": Range(1)}


class RelvitCLI(LightningCLI):
    """Lightning's CLI for one command: it parses the options, and builds the data and the model.

    `running` builds the trainer later, when the folder of the results is known.

    Attributes:
        datamodule: the images.
        model: the classifier, without the weights of the checkpoint.
        normalisation: a description of the images' normalisation.
        options: the arguments of the trainer.

    Args:
        function: a function whose arguments, except the first, become options in addition to the options of trainer,
            model and data.
        given: the command line.
        checkpoint: the checkpoint whose data and model the options must describe; None: a new training.
        known: the values of options that the command line does not give, see `values_of`.
        save_config_callback: the callback that writes the configuration of a training.
        model_class: function that makes the classifier from the options of the model.
    """

    def __init__(
        self,
        function: Callable[..., None],
        given: Arguments,
        checkpoint: Checkpoint | None = None,
        known: Namespace | None = None,
        save_config_callback: type[SaveConfigCallback] | None = None,
        model_class: type[BaseClassifier] = ImageClassifier,
    ) -> None:
        self.function: Callable[..., None] = function
        self.given: Arguments = given
        self.checkpoint: Checkpoint | None = checkpoint
        self.known: Namespace = Namespace() if known is None else known
        self.known.update(given.lists())
        super().__init__(
            model_class,
            ImageData,
            subclass_mode_data=True,
            parser_class=Parser,
            parser_kwargs={"prog": f"relvit {function.__name__}"},
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
        """Parse the command line, and refuse numbers out of their ranges and folders that runs are not written to.

        For files of `--config` see `check_configuration`.
        """
        for config in [word.partition("=")[2] for word in args if word.startswith("--config=")]:
            self.check_configuration(read_config(config) if config else {}, config)
        # jsonargparse writes the arguments of data modules as YAML, which has no bytes that are not text.
        if wrong := [word for word in args if word.startswith("--data.") and undecoded(word)]:
            raise UsageError(f"{wrong[0]} {undecoded(wrong[0])}")
        long, known = long_lists(self.known), self.known.clone()
        known.update(Namespace({name: texts[:1] for name, texts in long.items()}))
        self.config: Namespace = parser.parse_args(args, namespace=known)
        for name, texts in long.items():
            # If the option still has the first text alone, the command line has not replaced the list, so take the
            # whole list.
            if self.config.get(name) == texts[:1]:
                self.config[name] = texts
        check_numbers(self.config)
        check_runs(self.config.get("runs"), self.config.trainer.default_root_dir)

    def check_configuration(self, options: dict[str, Any], config: str) -> None:
        """Refuse a file of `--config` with options of `BEFORE_FILES`, which have no effect there."""
        for name in BEFORE_FILES:
            if (value := options.get(name)) is not None:
                raise UsageError(
                    f"{name} {cut(value, 80)} in {config} has no effect: take it out of the file, and give "
                    f"--{name} on the command line"
                )

    def instantiate_classes(self) -> None:
        """Build the data and the model; refuse options that contradict the checkpoint, this machine or each other."""
        with transforms_of({} if self.checkpoint is None else self.checkpoint.images_args):
            self.config_init: Namespace = self.parser.instantiate_classes(self.config)
        self.datamodule: ImageData = self.config_init.data
        self.model: BaseClassifier = self.config_init.model
        if self.datamodule.max_tokens is not None and self.given.values.get("data.img_size") is not None:
            raise UsageError("--data.max_tokens sets the size of the images: give no --img_size beside it")
        if "data.patch_size" in self.given.values and not self.datamodule.native:
            raise UsageError(
                "--data.patch_size is for images of native shapes (--data.native true): leave it out; the patches of a "
                "model are --model.model_kwargs.patch_size"
            )
        arguments = self.config.data.get("init_args", {})
        self.normalisation: str = set_normalisation(self.datamodule, arguments, self.checkpoint, self.model.pretrained)
        if self.checkpoint is not None:
            # Check the data first: if they have other classes, the network differs, too, but the classes are the cause.
            self.checkpoint.check_data(self.datamodule)
            self.checkpoint.check_network(self.model.hparams)
        self.options: dict[str, Any] = {**self.config_init.trainer}
        self.options["callbacks"] = as_list(self.options["callbacks"])
        self.launch: Launch | None = set_devices(self.options)

    @contextmanager
    def running(
        self, callbacks: Sequence[Callback], folder: Path | None, history: History | None = None, quiet: bool = False
    ) -> Iterator[Trainer]:
        """Context with the trainer; errors of the run inside are explained in one line.

        Args:
            callbacks: the callbacks of the command.
            folder: the folder for the results; None: the results are only printed.
            history: the history of a training; None in evaluation.
            quiet: whether to show no progress.
        """
        shown = progress_callbacks(self.options, history, quiet)
        own = [PatientLauncher(), *callbacks, *shown, DataRecord(folder)]
        logger, callbacks = self.options["logger"] or False, [*self.options["callbacks"], *own]
        self.trainer: Trainer = self.instantiate_trainer(**self.options | {"logger": logger, "callbacks": callbacks})
        with explained_failures(self.function.__name__, self.trainer, folder):
            check_processes(self.launch, self.trainer)
            yield self.trainer


class Evaluation(RelvitCLI):
    """The classifier and the data of a checkpoint, as the options of a command change them.

    Args:
        function, given: see `RelvitCLI`.
        checkpoint: the checkpoint, with the images that the command uses. Options that are not given have the values in
            the checkpoint.
        file: the local file of the checkpoint, or an exported file that is evaluated instead.
        asked: the data module that the command, or its user, has chosen.
    """

    checkpoint: Checkpoint

    def __init__(
        self, function: Callable[..., None], given: Arguments, checkpoint: Checkpoint, file: Path, asked: str | None
    ) -> None:
        # With native shapes, --img_size sets the number of patches, as `img_size` of `Predictor` does, so leave out the
        # checkpoint's number.
        without = ["data.max_tokens"] if "data.img_size" in given.values else []
        if is_exported(file):
            self.weights: str | None = None
            known = values_of(checkpoint, asked, [*without, *(f"model.{name}" for name in checkpoint.model)])
            known["model.path"], known["trainer.accelerator"] = str(file), "cpu"
            super().__init__(function, given, checkpoint, known, model_class=ExportedClassifier)
        else:
            self.weights = str(file)
            super().__init__(function, given, checkpoint, values_of(checkpoint, asked, without))

    def before_instantiate_classes(self) -> None:
        """Refuse options of the model that differ from the training's options."""
        given = self.config.model.as_dict()
        names = (name for name in self.checkpoint.model if name in given and name not in OF_EVALUATION)
        self.checkpoint.check_network(given, names)

    def set_reach(self, reach: Reach) -> None:
        """Choose how attention works at other sizes than in training."""
        self.model.set_reach(reach, self.checkpoint)

    def run(
        self,
        callbacks: Sequence[Callback] = (),
        folder: Path | None = None,
        report: Callable[[Trainer], None] = lambda trainer: None,
        **options: Any,
    ) -> None:
        """Run the Trainer's method that has the command's name, with the checkpoint's weights.

        Args:
            callbacks, folder: see `running`.
            report: a function that the main process calls at the end.
            options: further arguments of the method.
        """
        self.options["enable_checkpointing"] = False
        with self.running(callbacks, folder) as trainer:
            method = getattr(trainer, self.function.__name__)
            # With `weights_only`, PyTorch reads only tensors and plain types from the file, and runs no code in it.
            method(self.model, self.datamodule, ckpt_path=self.weights, weights_only=True, **options)
            if rank_zero_only.rank == 0:
                report(trainer)

    def note_part(self, split: Split) -> None:
        """Print a note if the user names the images, as by --root, and the split is only a part of them."""
        if "data.root" in self.given.values and (note := self.datamodule.part_note(split)):
            rank_zero_print(f"Note: {note}")


def evaluate(
    function: Callable[..., None], given: Arguments, data_type: type[ImageData] | None = None, **changes: Any
) -> None:
    """Run `relvit validate`, `test` or `predict`.

    Args:
        function: the function of the command. Its first argument is the `Evaluation`; its other arguments become
            options.
        given: the command line.
        data_type: the data module that the command chooses. None: the data module that the user names, or else the
            checkpoint's.
        changes: arguments that replace arguments of the training's data module, unless the user gives them.

    Raises:
        UsageError: no checkpoint is given.
    """
    path, asked = given.values.get("ckpt_path"), data_in(given.words)
    if path is None and any(name.endswith(("help", "help-all")) for name in given.values):
        # To print the help and exit, the parser needs no checkpoint.
        RelvitCLI(function, given)
    if path is None:
        raise UsageError(f"no checkpoint given: relvit {function.__name__} runs/RUN/checkpoints/best.ckpt")
    # Give Lightning the local copy: given an http address, it reads an earlier download of the same file name, if any.
    with local_file(path) as file:
        checkpoint = ExportedClassifier(file).checkpoint if is_exported(file) else Checkpoint.read(path, file)
        if asked is None:
            data_type = data_type or checkpoint.data_of_root(given.values.get("data.root"))
        checkpoint = checkpoint.with_data(data_type or import_data_module(asked or ""), **changes)
        asked = asked if data_type is None else checkpoint.data["class_path"]
        evaluation = Evaluation(function, given, checkpoint, file, asked)
        names = (name for name in function.__annotations__ if name in evaluation.config_init)
        function(evaluation, **{name: evaluation.config_init[name] for name in names})
    leave_processes()


def refuse_other_images(given: Arguments, others: Sequence[str], named: str) -> None:
    """Refuse options that name images if `named`, another argument, already names the images."""
    values = given.values | {"data": data_in(given.words)}
    for other in others:
        if (value := values.get(other)) is not None:
            raise UsageError(f"--{other} {value} and {named} both name the images: give one of them")


def values_of(checkpoint: Checkpoint, asked_data: str | None, without: Collection[str] = ()) -> Namespace:
    """Return the arguments of model and data in a checkpoint, as initial values of a parser.

    A checkpoint must not choose which modules are imported, so the user has to name a data module from outside relvit
    by `--data`. Arguments in `without`, such as 'model.img_size', are left out.

    Raises:
        UsageError: the user has not named the checkpoint's data module.
    """
    data, values = checkpoint.data["class_path"], Namespace()
    for name, value in checkpoint.model.items():
        if f"model.{name}" not in without:
            values[f"model.{name}"] = value
    if checkpoint.data_type is not None or data == asked_data:
        arguments = {name: value for name, value in checkpoint.data_args.items() if f"data.{name}" not in without}
        values["data"] = Namespace(class_path=data, init_args=Namespace(arguments))
    elif asked_data is None:
        raise UsageError(checkpoint.unknown_data())
    return values


def long_lists(known: Namespace) -> dict[str, list[str]]:
    """Return the long lists of texts among the arguments of relvit's data modules, such as class names and paths."""
    data = known.get("data")
    if not isinstance(data, Namespace) or not str(data.get("class_path")).startswith("relvit."):
        return {}
    lists = {f"data.init_args.{name}": value for name, value in vars(data.init_args).items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) > LONG and all(type(x) is str for x in value)}


def check_numbers(options: Mapping[str, Any]) -> None:
    """Refuse numbers of the trainer, and of the command's own options, that are out of their ranges.

    Raises:
        UsageError: a number is out of its range.
    """
    for name, allowed in RANGES.items():
        number = options.get(name)
        # -1, which means no limit, is allowed for the number of epochs or of steps, but not for both, since the
        # learning rate's schedule needs an end.
        ends = name == "trainer.max_steps" or (options.get("trainer.max_steps") or -1) > 0
        endless = name in ("trainer.max_epochs", "trainer.max_steps") and number == -1 and ends
        if isinstance(number, int | float) and not isinstance(number, bool) and number not in allowed and not endless:
            raise UsageError(f"--{name} must be {allowed}, got {number}")
