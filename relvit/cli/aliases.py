"""Short names of options (aliases) and arguments without a name: rewritten before the parser sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relvit.cli.errors import UsageError
from relvit.cli.shipped_configs import shipped_configs

_DATA = {f"--{name}": f"--data.{name}" for name in ("root", "img_size", "batch_size", "num_workers")}
_TRAINER = {f"--{name}": f"--trainer.{name}" for name in ("devices", "accelerator", "precision")}
_TRAINING = {"--epochs": "--trainer.max_epochs"} | {f"--{name}": f"--model.{name}" for name in ("model", "lr")}
_TRAINING |= {"--pretrained": "--model.pretrained", "--logger": "--trainer.logger"}
# The TensorBoard log is the default, and a run's metrics.csv is always there.
LOGGERS = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger", "tensorboard": "null", "csv": "false"}

# Command -> {another name of an option: its name}.
ALIASES: dict[str, dict[str, str]] = {
    "fit": _DATA | _TRAINER | _TRAINING,
    **dict.fromkeys(("validate", "test", "predict"), _DATA | _TRAINER),
    "predict-onnx": {"--ckpt_path": "--model"},
    "explain": {"--model.model": "--model"},
}
# Commands with a data module of their own. The others take its options `--data.NAME` for their `--NAME`, too.
_OWN_DATA = ("fit", "validate", "test", "predict", "probe", "check-data")

# Command -> the options that arguments without a name stand for.
POSITIONALS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("validate", "test", "resolutions", "export", "publish", "demo", "calibrate"), ("--ckpt_path",)),
    "predict": ("--ckpt_path", "--paths"),
    "predict-onnx": ("--model", "--paths"),
    "embed": ("--ckpt_path", "--root"),
    "show": ("--ckpt_path", "--images"),
    "explain": ("--model",),
    "average": ("--ckpt_paths",),
    "probe": ("--models",),
    "check-data": ("--root",),
}
USAGE: dict[str, tuple[str, ...]] = {
    "fit": ("relvit fit --root DIR [options]", "relvit fit --config FILE [options]"),
    "validate": ("relvit validate CKPT [options]",),
    "test": ("relvit test CKPT [options]",),
    "predict": ("relvit predict CKPT [PATH ...] [options]", "relvit predict --model FILE.onnx PATH ... [options]"),
    "predict-onnx": ("relvit predict --model FILE.onnx PATH ... [options]",),
    "resolutions": ("relvit resolutions CKPT ... --sizes SIZE ... [options]",),
    "embed": ("relvit embed CKPT FOLDER --output FILE [options]",),
    "export": ("relvit export CKPT --output FILE [options]",),
    "publish": ("relvit publish CKPT --to DIR|hf-hub:OWNER/NAME [options]",),
    "demo": ("relvit demo CKPT [--port N] [options]",),
    "show": ("relvit show CKPT [IMAGE ...] [--kind KIND ...] [options]",),
    "explain": ("relvit explain MODEL|CKPT [--img_size N]",),
    "calibrate": ("relvit calibrate CKPT [--output FILE] [options]",),
    "probe": ("relvit probe CKPT|MODEL ... [--root DIR | --data NAME] [options]",),
    "average": ("relvit average CKPT CKPT ... --output FILE",),
    "check-data": ("relvit check-data FOLDER [options]", "relvit check-data --data NAME [options]"),
}
# Those that take several; a checkpoint alone is no list where there may be one or several.
LISTS = ("--ckpt_paths", "--paths", "--images", "--models")
ONE_OR_SEVERAL = ("resolutions", "--ckpt_path")
# Options that take all values of this form that follow.
SEVERAL = {"--sizes": r"\[?\d", "--shares": r"[\d.]", "--patch": r"\d+$"}
SEVERAL["--kind"] = r"(tables|kernels|logits|attention|rollout|cam|aft-windows)$"
# Options that need no value to be true.
SWITCHES = ("--mirror", "--step_maps", "--lr_find", "--random", "--int8", "--aot")
ALONE = ("-h", "--help", "--help-all", "--print_config", "-q", "--quiet")
# Where a value of `--model` is a file of the model's options, as the parser takes it, and no name.
_FILE = (".yaml", ".yml", ".json")

# Last part of an option's name -> what the option is called in other libraries.
_ELSEWHERE = {
    "lr": "learning_rate lr0 base_lr",
    "max_epochs": "num_epochs n_epochs num_train_epochs",
    "batch_size": "batch bs",
    "num_workers": "workers",
    "img_size": "imgsz image_size size resolution",
    "devices": "gpus gpu num_gpus",
    "precision": "amp fp16 bf16",
    "root": "path data_dir data_path",
    "runs": "output output_dir save_dir",
    "opt": "optimizer optim",
    "model": "arch",
    "pretrained": "weights",
    "weight_decay": "wd",
    "warmup_epochs": "warmup",
    "patience": "early_stopping",
    "seed_everything": "seed",
}
SYNONYMS = {other: own for own, others in _ELSEWHERE.items() for other in others.split()}

# Options that a command does not have although it is like others that do, and what to do instead.
ELSEWHERE = {
    ("validate", "--split"): "validate uses the images of val; to use others: relvit test --split SPLIT",
    ("validate", "--runs"): "validate prints its results and writes no file; to get a report: relvit test --runs DIR",
    ("predict", "--split"): "predict takes images without labels; name their folder instead, such as photos/val",
}


class Rewritten(NamedTuple):
    """A command's arguments by the names that its parser knows.

    Attributes:
        arguments: each as '--name=value', or '--name' where an option has no value.
        lists: options that take several values, by their names, with the arguments that had no name.
        typed: the name that the user gave, of each option that has another one.
    """

    arguments: list[str]
    lists: dict[str, list[str]]
    typed: Mapping[str, str]

    def as_typed(self, message: str) -> str:
        """Return a message with the names of options that the user gave."""
        for name, given in self.typed.items():
            message = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.])", given, message)
        return message


def option(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value given for an option in arguments of the form '--name=value'."""
    values = [argument.removeprefix(f"{name}=") for argument in arguments if argument.startswith(f"{name}=")]
    return values[-1] if values else None


def without(arguments: Sequence[str], name: str) -> list[str]:
    """Return all arguments but an option, of the form '--name=value'."""
    return [argument for argument in arguments if not argument.startswith(f"{name}=")]


def rewrite(command: str, arguments: Sequence[str]) -> Rewritten:
    """Replace short names of options by their own, and name the arguments that have no name.

    Options of the data that were given by a short name come last: the parser takes them only after `--data NAME`.

    Raises:
        UsageError: an argument without a name where there is none to take, two different values for one option under
            two names, or an option that another command has.
    """
    aliases, kept, last, bare, typed = ALIASES.get(command, {}), [], [], [], {}
    values: dict[str, dict[str, str]] = {}
    for name, value in _split(arguments):
        if name is None:
            bare.append(best_of_run(value))
            continue
        if reason := ELSEWHERE.get((command, name)):
            raise UsageError(f"{name}: {reason}")
        own = aliases.get(name, name)
        if command not in _OWN_DATA and name.startswith("--data."):
            own = f"--{name.removeprefix('--data.')}"
        if name == "--model" and (value is None or value.endswith(_FILE) or value.startswith("{")):
            own = name
        if own == "--ckpt_path" and command != "fit" and value is not None:
            value = best_of_run(value)
        if own in ("--config", "-c") and value is not None:
            value = config_file(value)
        if own == "--trainer.logger":
            value = LOGGERS.get(value, value)
        if value is not None:
            values.setdefault(own, {})[name] = value
        if own != name:
            typed[own] = name
        place = last if own != name and own.startswith("--data.") else kept
        place.append(own if value is None else f"{own}={value}")
    for given in values.values():
        if len(set(given.values())) > 1:
            both = " and ".join(f"{name} {value}" for name, value in given.items())
            raise UsageError(f"{both} are two values for one option: give one of them")
    found, lists = _named(command, bare, values)
    kept += found
    chosen = {"--data", "--data.class_path", "--config", "-c", "--resume", "--ckpt_path"} & values.keys()
    if command == "fit" and "--data.root" in values and not chosen:
        kept.insert(0, "--data=ImageFolderData")
    return Rewritten([*kept, *last], lists, typed)


def config_file(given: str) -> str:
    """Return the file of a configuration that comes with relvit, by its name; a file or JSON is returned as it is."""
    shipped = shipped_configs().get(given)
    return str(shipped) if shipped and not Path(given).is_file() else given


def best_of_run(given: str) -> str:
    """Return the best checkpoint of a run where its folder is given; anything else is returned as it is."""
    best = os.path.join(given, "checkpoints", "best.ckpt")
    return best if os.path.isfile(best) else given


def _split(arguments: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Yield name and value of each option; no name for an argument without one, no value for an option without one.

    `--sizes` takes all numbers and pairs that follow it; see `SEVERAL`.
    """
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            yield from ((None, rest) for rest in waiting)
            return
        name, equals, value = argument.partition("=")
        if not _is_option(argument):
            yield None, argument
        elif equals and name in ALONE and name != "--print_config":
            raise UsageError(f"{name} takes no value, got {value!r}: give {name} alone")
        elif equals:
            yield name, _as_list([value]) if name in SEVERAL else value
        elif name in ALONE or not waiting or _is_option(waiting[0]):
            yield name, "true" if name in SWITCHES else None
        elif name in SWITCHES and waiting[0].lower() not in ("true", "false"):
            yield name, "true"
        elif name in SEVERAL:
            taken = [waiting.pop(0)]
            while waiting and re.match(SEVERAL[name], waiting[0]):
                taken.append(waiting.pop(0))
            yield name, _as_list(taken)
        else:
            yield name, waiting.pop(0)


def _as_list(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 and values[0].startswith("[") else f"[{','.join(values)}]"


def _is_option(argument: str) -> bool:
    # A number below zero is a value.
    return re.match(r"-[^\d.\s]", argument) is not None


def _named(command: str, bare: Sequence[str], values: Mapping[str, object]) -> tuple[list[str], dict[str, list[str]]]:
    """Turn the arguments that have no name into options, and into lists of those that take several."""
    # A checkpoint that was given by its name leaves the rest to what comes after it.
    names = [name for name in POSITIONALS.get(command, ()) if name not in values]
    found, rest = [], list(bare)
    for name in names:
        if rest and (name in LISTS or ((command, name) == ONE_OR_SEVERAL and len(rest) > 1)):
            return found, {name.removeprefix("--"): rest}
        if rest:
            found.append(f"{name}={rest.pop(0)}")
    if rest:
        given = [name for name in POSITIONALS.get(command, ()) if name in values]
        hint = f"{' and '.join(given)} given already" if given else "each value follows the name of its option"
        raise UsageError(f"unexpected argument {rest[0]!r}: {hint}; relvit {command} --help lists the options")
    return found, {}
