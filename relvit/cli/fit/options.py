"""Options of `relvit fit|validate|test|predict` beside those of the Trainer, the model and the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from jsonargparse import ArgumentParser

from relvit.cli.errors import UsageError
from relvit.models import Reach
from relvit.utils.ranges import Range

# Where they differ from Lightning's.
TRAINER_DEFAULTS: dict[str, Any] = {"max_epochs": 100, "enable_model_summary": False}

# The models with `--step_maps`.
STEP_MAPS = "for models that halt: relvit_universal_* trained with --model.model_kwargs.halting act"

# Options that Lightning takes any number for, or refuses in other words: what they may be.
_POSITIVE, _COUNT = Range(1), Range(0)
RANGES: dict[str, Range] = {
    "seed_everything": Range(0, 2**32 - 1),
    "save_every": _POSITIVE,
    "patience": _POSITIVE,
    **dict.fromkeys(("trainer.max_epochs", "trainer.min_epochs"), _POSITIVE),
    **dict.fromkeys(("trainer.max_steps", "trainer.min_steps"), _POSITIVE),
    **dict.fromkeys(("trainer.accumulate_grad_batches", "trainer.check_val_every_n_epoch"), _POSITIVE),
    "trainer.num_nodes": _POSITIVE,
    **dict.fromkeys((f"trainer.limit_{split}_batches" for split in ("train", "test", "predict")), Range(0, above=True)),
    "trainer.val_check_interval": Range(0, above=True),
    **dict.fromkeys(("trainer.gradient_clip_val", "trainer.overfit_batches", "trainer.limit_val_batches"), _COUNT),
    **dict.fromkeys(("trainer.log_every_n_steps", "trainer.reload_dataloaders_every_n_epochs"), _COUNT),
    "trainer.num_sanity_val_steps": Range(-1),
}


def check_numbers(options: Mapping[str, Any]) -> None:
    """Refuse numbers of the trainer, and of the command's own options, that are out of their ranges.

    Raises:
        UsageError: one is.
    """
    for name, allowed in RANGES.items():
        number = options.get(name)
        # A training needs one end, as its schedule does.
        ends = name == "trainer.max_steps" or (options.get("trainer.max_steps") or -1) > 0
        endless = name in ("trainer.max_epochs", "trainer.max_steps") and number == -1 and ends
        if isinstance(number, int | float) and not isinstance(number, bool) and number not in allowed and not endless:
            raise UsageError(f"--{name} must be {allowed}, got {number}")


def add_own_options(parser: ArgumentParser, command: str) -> None:
    """Add the options of a command to its parser."""
    add = parser.add_argument
    if command in ("fit", "test", "predict"):
        add("--runs", type=str, default="runs", help="The folder in which the results get a folder of their own.")
    if command == "test":
        text = "The images to use: those of train (without augmentation), val or test."
        add("--split", type=Literal["train", "val", "test"], default="test", help=text)
        text = "Test on the folder of a robustness set (CLASS/IMAGE, or CORRUPTION/SEVERITY/CLASS/IMAGE), among its "
        text += "classes alone."
        add("--robustness", type=str | None, default=None, help=text)
    if command != "fit":
        text = f"How attention works at other sizes than in training: {', '.join(get_args(Reach))}; see docs/sizes.md."
        add("--reach", type=Reach, default="trained", help=text)
    if command in ("test", "predict"):
        text = "Average the probabilities of each image and its mirror image."
        add("--mirror", type=bool, default=False, help=text)
    if command == "predict":
        text = f"Draw how many steps each patch took ({STEP_MAPS}); the table gets the mean of each image."
        add("--step_maps", type=bool, default=False, help=text)
    if command == "fit":
        text = "Continue the training in the folder of that run, with its configuration and from its last checkpoint."
        add("--resume", type=str | None, default=None, help=text)
        text = "Save a checkpoint after every N optimiser steps, besides each epoch."
        add("--save_every", type=int | None, default=None, help=text)
        text = "Stop after N validations in a row without a better accuracy, or mean average precision of several "
        text += "labels."
        add("--patience", type=int | None, default=None, help=text)
        text = "Find the learning rate by a range test of 100 steps first."
        add("--lr_find", type=bool, default=False, help=text)
        text = "Show no progress, neither a bar nor a line for each epoch: only start, result and errors."
        add("-q", "--quiet", action="store_true", help=text)
