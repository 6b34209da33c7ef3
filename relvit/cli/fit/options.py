"""Options of `relvit fit|validate|test|predict` beside those of the Trainer, the model and the data."""

from __future__ import annotations

from typing import Any, Literal

from jsonargparse import ArgumentParser

# Where they differ from Lightning's.
TRAINER_DEFAULTS = {"max_epochs": 100, "enable_model_summary": False}

# Name: commands that have the option, its type, its default and its help.
OWN_OPTIONS: dict[str, tuple[tuple[str, ...], Any, Any, str]] = {
    "runs": (("fit", "test", "predict"), str, "runs", "The folder in which the results get a folder of their own."),
    "split": (
        ("test",),
        Literal["train", "val", "test"],
        "test",
        "The images to use: those of train (without augmentation), val or test.",
    ),
    "mirror": (
        ("test", "predict"),
        bool,
        False,
        "Average the probabilities of each image and its mirror image.",
    ),
    "resume": (
        ("fit",),
        str | None,
        None,
        "Continue the training in the folder of that run, with its configuration and from its last checkpoint.",
    ),
    "save_every": (
        ("fit",),
        int | None,
        None,
        "Save a checkpoint after every N optimiser steps, besides each epoch.",
    ),
    "patience": (("fit",), int | None, None, "Stop after N validations in a row without a better accuracy."),
    "lr_find": (("fit",), bool, False, "Find the learning rate by a range test of 100 steps first."),
}


def add_own_options(parser: ArgumentParser, command: str) -> None:
    """Add the options of a command to its parser."""
    for name, (commands, kind, default, text) in OWN_OPTIONS.items():
        if command in commands:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    if command == "fit":
        text = "Show no progress, neither a bar nor a line for each epoch: only start, result and errors."
        parser.add_argument("-q", "--quiet", action="store_true", help=text)
