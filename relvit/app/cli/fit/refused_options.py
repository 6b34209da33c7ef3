"""Options of Lightning that `relvit fit` refuses, since a run writes its own files; `docs/options.md` lists them.

`relvit.app.training.lightning_options` refuses options that no training of relvit can use, also in Python.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from relvit.app.cli.errors import UsageError
from relvit.app.cli.parser import Parser
from relvit.app.training.lightning_options import check_callback
from relvit.app.training.run.processes import as_list

# For each of these options of the Trainer, one value is refused, for a reason. `TRIAL`, the option to use instead, ends
# the sentence.
REFUSED: dict[str, tuple[bool, str]] = {
    "enable_checkpointing": (False, "a run writes best.ckpt and last.ckpt; a trial that writes nothing is"),
    "barebones": (True, "a run writes checkpoints, metrics and figures; a trial that writes nothing is"),
}
TRIAL = "--trainer.fast_dev_run true"


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of the trainer that contradict the files of a run, or that have no effect.

    Raises:
        UsageError: An argument contradicts the run or has no effect.
        ValueError: A callback does not work with relvit's trainings.
    """
    for name, (refused, reason) in REFUSED.items():
        if options[name] is refused:
            raise UsageError(f"--trainer.{name} {str(refused).lower()}: {reason} {TRIAL}")
    if options["gradient_clip_algorithm"] is not None and options["gradient_clip_val"] is None:
        given = options["gradient_clip_algorithm"]
        raise UsageError(
            f"--trainer.gradient_clip_algorithm {given} has no effect without --trainer.gradient_clip_val: give both "
            "or neither"
        )
    for plugin in as_list(options["plugins"]):
        if isinstance(plugin, CheckpointIO):
            name = type(plugin).__name__
            raise UsageError(
                f"--trainer.plugins {name}: relvit writes checkpoints by its own plugin, AtomicCheckpointIO: leave "
                f"{name} out"
            )
    for callback in options["callbacks"]:
        if isinstance(callback, OnExceptionCheckpoint):
            raise UsageError(
                "Lightning's OnExceptionCheckpoint cannot be used here: the next training would go on from its file "
                "unasked; leave it out: if an error ends a run, relvit writes last.ckpt, and relvit fit --resume RUN "
                "goes on from there"
            )
        check_callback(callback, bool(options["logger"]))


def check_recorded(parser: Parser, config: Namespace) -> None:
    """Refuse values that `config.yaml` cannot hold, since the run could not be resumed.

    Raises:
        UsageError: `config.yaml` cannot hold a value.
    """
    with warnings.catch_warnings():
        # jsonargparse warns of a value that YAML cannot hold, and writes the text of the warning in the value's place.
        # The search below finds this text, so the warning itself need not be shown.
        warnings.simplefilter("ignore")
        try:
            found = re.search(r"Unable to serialize instance (.*)", parser.dump(config, skip_none=False))
        except yaml.representer.RepresenterError as error:
            found = re.search(r"object', (.*)\)", str(error))
    if found is not None:
        raise UsageError(
            f"config.yaml cannot hold {found[1]}, an argument of a class in the trainer's options, so this run could "
            "not be resumed: give the argument as text or a number, or leave the class out"
        )
