"""Options of `relvit fit|validate|test|predict` beside those of the Trainer, the model and the data."""

from __future__ import annotations

from typing import Any, Literal

from jsonargparse import ArgumentParser

from relvit.models import Reach

# Where they differ from Lightning's.
TRAINER_DEFAULTS: dict[str, Any] = {"max_epochs": 100, "enable_model_summary": False}


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
        text = "How attention works at other sizes than in training: trained, stretch, logn, stretch-logn, windows or "
        text += "bands (large images in flat memory)."
        add("--reach", type=Reach, default="trained", help=text)
    if command in ("test", "predict"):
        text = "Average the probabilities of each image and its mirror image."
        add("--mirror", type=bool, default=False, help=text)
    if command == "predict":
        text = "Draw how many steps each patch took, for models with halting; the table gets the mean of each image."
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
