"""Parse a command's options by jsonargparse, with types mended; `mistakes.py` explains what the parser refuses."""

from __future__ import annotations

import inspect
from argparse import Action, ArgumentError
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from relvit.app.cli.config_text import MODE
from relvit.app.cli.errors import UsageError
from relvit.app.cli.mistakes import explain
from relvit.app.cli.secrets import CLASSES, without_data_masks, without_masks
from relvit.app.cli.trainer.own_data import open_inherited_options
from relvit.app.cli.typed_words import parameters, parts
from relvit.app.data import ImageData

# If the docstring of a command does not describe an option, the help shows one of these texts.
SHARED: dict[str, str] = {
    "ckpt_path": "The checkpoint to use, such as runs/RUN/checkpoints/best.ckpt.",
    "reach": "How attention works at other sizes than in training; help(relvit.models.set_reach) explains the names.",
    "img_size": "The size of the images that the model gets, such as 288 or [256,384]; None means as in training.",
    "batch_size": "The number of images in a batch; None means as in training.",
    "root": "The folder of the images, where it is not the one that the checkpoint remembers.",
    "data": "The data module of the images if it is your own, such as my_module.Mine; --data.OPTION for its arguments.",
    "output": "A file for the figures that ends in .csv, .json or .png (curves), or a folder for all three.",
    "device": "The device that computes, such as cpu or cuda:1; auto takes an accelerator if there is one.",
    "runs": "The folder in which the results get a folder of their own.",
    "mirror": "Average the probabilities of each image and its mirror image.",
}


class Parser(LightningArgumentParser):
    """Parser that raises `UsageError` where jsonargparse's parser prints its usage and exits.

    Options must be spelt out, because an abbreviation may become ambiguous when a new option is added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"allow_abbrev": False, "description": "", "parser_mode": MODE}
        super().__init__(*args, **{**defaults, **kwargs, "exit_on_error": False})
        self.add_argument("--help-all", action="help", help="Show all options.")

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **kwargs: Any
    ) -> Namespace:
        """Parse arguments; a namespace gives the initial values of options, such as the values in a checkpoint."""
        try:
            return super().parse_args(args, namespace, **kwargs)
        except (ArgumentError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise UsageError(explain(self, args or (), namespace, error)) from error

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any, **options: Any) -> Any:
        """Add the arguments of a class as options; arguments that a user's data module passes on have no defaults."""
        added = super().add_class_arguments(theclass, nested_key, *args, **options)
        for action in self._actions:
            _put_int_before_float(action)
        if inspect.isclass(theclass) and issubclass(theclass, ImageData) and theclass.is_of_user():
            open_inherited_options(self, theclass, nested_key)
        return added

    def add_options_of(self, function: Callable[..., Any]) -> None:
        """Add the arguments of a command's function as options; an `Evaluation` is made from a checkpoint."""
        if "evaluation" in parameters(function):
            self.add_argument("--ckpt_path", type=str)
        for part in parts(function):
            self.add_function_arguments(part, as_group=False, skip={"given", "evaluation", "training", "data_args"})
        for action in self._actions:
            if action.dest in SHARED and not action.help:
                action.help = SHARED[action.dest]

    def instantiate_classes(self, cfg: Namespace, **kwargs: Any) -> Namespace:
        """Build the objects of a configuration in which secrets may be hidden as `***`.

        Loggers, callbacks and data modules are built without their hidden secrets, and read them from the environment.
        The user has to give again the hidden secrets that have no default.
        """
        cfg = cfg.clone()
        if "data" in cfg:
            cfg.data = without_data_masks(cfg.data)
        if "trainer" in cfg:
            for kind in CLASSES:
                cfg.trainer[kind] = without_masks(cfg.trainer[kind], kind)
        return super().instantiate_classes(cfg, **kwargs)


def _put_int_before_float(action: Action) -> None:
    """Read whole numbers as int: one for Lightning's `limit_val_batches` is one batch, and 1.0 is all batches.

    Lightning declares `Union[int, float]`, but Python remembers unions without their order: if another library has used
    `Union[float, int]` before, Lightning's union has that order, and jsonargparse tries float first.
    """
    kinds = list(getattr(getattr(action, "_typehint", None), "__args__", None) or ())
    if int in kinds and float in kinds and kinds.index(float) < kinds.index(int):
        kinds.remove(int)
        kinds.insert(kinds.index(float), int)
        # `|` makes a new union in this order, whatever unions Python remembers.
        action._typehint = reduce(or_, kinds)
