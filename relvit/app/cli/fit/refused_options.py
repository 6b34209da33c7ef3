"""Options that `relvit fit` refuses, since they contradict the files of a run or config.yaml cannot hold their values.

`docs/options.md` lists these options. `relvit.app.training.lightning_options` refuses options that no training of
relvit can use, also in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from relvit.app.cli.errors import UsageError
from relvit.app.cli.parser import Parser
from relvit.app.training.checkpoints.file import EPOCH_NAME
from relvit.app.training.lightning_options import check_callback
from relvit.app.training.run.processes import as_list
from relvit.app.utils.masks import fields_of

# For a value that YAML cannot hold, jsonargparse writes this text, followed by the value's `str`.
LOST = "Unable to serialize instance "

# These are the names of relvit's own checkpoints, without their ending.
OWN = ("best", "last", Path(EPOCH_NAME).stem)

# `REFUSED` maps options of the Trainer to the value that is refused, and to the reason.
REFUSED: dict[str, tuple[bool, str]] = {
    "enable_checkpointing": (False, "a run writes best.ckpt and last.ckpt"),
    "barebones": (True, "a run writes checkpoints, metrics and figures"),
}


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of the trainer that contradict the files of a run, or that have no effect.

    Raises:
        UsageError: `enable_checkpointing` is false or `barebones` true; or `gradient_clip_algorithm` is given without
            `gradient_clip_val`.
        UsageError: a plugin is a `CheckpointIO`, a callback is an `OnExceptionCheckpoint`, or a `ModelCheckpoint` would
            write one of relvit's own checkpoints.
        ValueError: A callback is one that `check_callback` refuses.
    """
    for name, (refused, reason) in REFUSED.items():
        if options[name] is refused:
            raise UsageError(
                f"--trainer.{name} {str(refused).lower()}: {reason}: leave this option out; --trainer.fast_dev_run "
                "true alone is a trial that writes nothing"
            )
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
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None and callback.filename in OWN:
            raise UsageError(
                f"ModelCheckpoint with filename {callback.filename} would replace the {callback.filename}.ckpt that "
                "relvit writes: give it another filename, or a dirpath"
            )
        check_callback(callback, bool(options["logger"]))


def check_recorded(parser: Parser, config: Namespace) -> None:
    """Refuse values that `config.yaml` cannot hold, since the run could not be resumed.

    Raises:
        UsageError: `config.yaml` cannot hold a value.
    """
    with warnings.catch_warnings():
        # jsonargparse warns of a value that YAML cannot hold. The search below finds the value, so the warning need not
        # be shown.
        warnings.simplefilter("ignore")
        try:
            held = yaml.safe_load(parser.dump(config, skip_none=False))
            texts = ((name, str(value)) for name, value in _all_values(held))
            found = [(name, text.removeprefix(LOST)) for name, text in texts if text.startswith(LOST)]
        except (ValueError, yaml.representer.RepresenterError) as error:
            # For annotated types, jsonargparse wraps PyYAML's error in a ValueError, so look for PyYAML's error among
            # the causes.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, yaml.representer.RepresenterError):
                cause = cause.__cause__
            if cause is None:
                raise
            lost = cause.args[1]
            found = [(name, repr(lost)) for name, value in _all_values(config) if value is lost]
            found = found or [("an option", repr(lost))]
    if found:
        name, value = found[0]
        cure = "give it as text or a number"
        if not name.startswith("data."):
            cure += ", or leave its class out"
        raise UsageError(f"config.yaml cannot hold {value}, the value of {name}, so no run could be resumed: {cure}")


def _all_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in a configuration after its name, such as 'data.init_args.root'."""
    if isinstance(value, Mapping | Namespace):
        items = fields_of(value).items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, each in items:
        yield from _all_values(each, f"{name}.{key}" if name else str(key))
