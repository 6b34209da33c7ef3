"""The short help of each command: the options that matter, with the texts and defaults of the code itself."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from lightning import Trainer

from relvit.app.cli.mistakes import required
from relvit.app.cli.option_types import choices, item_type, takes_one
from relvit.app.cli.parser import Parser
from relvit.app.cli.trainer.lightning_cli import TRAINER_DEFAULTS
from relvit.app.cli.typed_words import PRECISIONS, parameters, positionals, short_names, type_hints
from relvit.app.data import ImageFolderData
from relvit.app.data.registry import data_modules
from relvit.app.training import ImageClassifier
from relvit_start import COMMANDS

WIDTH, INDENT = 100, 34

DATA = ("root", "img_size", "batch_size", "num_workers", "data", "data.on_error")
DEVICES = ("devices", "accelerator", "precision")
# The help of `fit` shows only these of its hundreds of options, by groups; `--help-all` shows all options.
FIT: dict[str, tuple[str, ...]] = {
    "data": (*DATA, "data.augment", "data.cache"),
    "model": (
        *("model", "model.model_kwargs.X", "pretrained", "model.retrofit.X"),
        *("model.freeze_epochs", "model.ema_decay"),
    ),
    "optimisation": (
        *("epochs", "lr", "lr_find", "model.lr_base_batch", "model.warmup_epochs", "model.opt"),
        *("model.weight_decay", "model.layer_decay", "model.label_smoothing", "model.mixup", "model.cutmix"),
        *("trainer.gradient_clip_val", "trainer.accumulate_grad_batches", "patience"),
    ),
    "run and devices": ("config", "runs", "resume", "save_every", "seed_everything", "quiet", *DEVICES),
}
_KINDS = f"{', '.join(sorted(cls.__name__ for cls in data_modules()))}; --data.help NAME lists the options of a kind."
# The help shows these texts for options that relvit's docstrings do not describe, or describe at great length.
TEXTS: dict[str, str] = {
    "config": "A configuration in YAML, or one of relvit's by its name, such as digits; later ones override "
    "earlier ones, options override both.",
    "seed_everything": "The seed of all random numbers. Default: 0.",
    **{
        f"{command} data": f"The kind of data: {_KINDS} --root alone means ImageFolderData."
        for command in ("fit", "probe", "check-data")
    },
    **{
        f"{command} data": f"The kind of data, by default the one of the training: {_KINDS}"
        for command in ("validate", "test", "predict")
    },
    "data.on_error": "What to do about a file that cannot be read: error stops; skip, which predict does by default, "
    "goes on without it.",
    "data.cache": "Decode all images once and keep them in memory.",
    "model.lr_base_batch": "Scale the learning rate by the images in a step, relative to N.",
    "model.model_kwargs.X": "An argument X of that model, such as rel_terms, max_distance or drop_path_rate.",
    "model.retrofit.X": "An argument X of relvit.retrofit for timm's ViTs: rel_terms ...",
    "trainer.devices": "The number of devices (GPUs or CPU processes) to use. Default: auto.",
    "trainer.accelerator": "The kind of device: auto, cpu, gpu or mps (untested). Default: auto.",
    "trainer.precision": f"The number format. One of {', '.join(PRECISIONS)}. Default: 32-true.",
}
# `METAVARS` maps the last part of an option's name, alone or after its command, to the word that the help shows for the
# option's value, such as DIR in `--root DIR`. For all other options the help shows N, X, BOOL or NAME, by their types.
METAVARS: dict[str, str] = {
    **dict.fromkeys(("root", "runs", "robustness", "show output", "calibration"), "DIR"),
    **dict.fromkeys(("config", "output"), "FILE"),
    **dict.fromkeys(("probe output", "resolutions output"), "FILE|DIR"),
    **dict.fromkeys(("ckpt_path", "ckpt_paths"), "CKPT"),
    **dict.fromkeys(("img_size", "sizes", "widths"), "SIZE"),
    **dict.fromkeys(("seed_everything", "devices"), "N"),
    "paths": "PATH",
    "images": "IMAGE",
    "models": "CKPT|MODEL",
    "explain model": "MODEL|CKPT",
    "kind": "KIND",
    "patch": "ROW COLUMN",
    "resume": "RUN",
    "pretrained": "WEIGHTS",
    "to": "DIR|hf-hub:OWNER/NAME",
    "license": "ID",
    "curve": "FILE.json",
    "X": "VALUE",
}
# `USAGE` has further lines of usage for some commands. `usage` derives the first line from the signature of the
# command's function, except for `fit`, whose lines are all in `USAGE`.
USAGE: dict[str, list[str]] = {
    "fit": ["relvit fit --root DIR [options]", "relvit fit --config FILE [options]"],
    "predict": ["relvit predict FILE.onnx PATH ... [options]"],
    "check-data": ["relvit check-data --data NAME [options]"],
}


def usage(command: str, function: Callable[..., Any]) -> list[str]:
    """Return the lines that show how a command is used."""
    hints, needed = type_hints(function), required(function)
    parts = ["relvit", command]
    for name, hint in positionals(function).items():
        text = metavar(command, name, hint) + (" ..." if item_type(hint) and takes_one(hint) else "")
        parts.append(text if name in needed or name == "ckpt_path" else f"[{text}]")
    options = (name for name in needed if name in hints and name not in (*positionals(function), "evaluation"))
    parts += [f"--{name} {metavar(command, name, hints[name])}" for name in options]
    own = [] if command == "fit" else [" ".join([*parts, "[options]"])]
    return own + USAGE.get(command, [])


def metavar(command: str, name: str, hint: Any) -> str:
    """Return the placeholder for the value of an option, such as DIR; '' if the option needs no value."""
    last, several = name.rpartition(".")[2], item_type(hint) is not None and not takes_one(hint)
    if hint is bool and "." not in name:
        return ""
    plain = {int: "N", float: "X", bool: "BOOL"}
    by_type = next((plain[kind] for kind in (hint, *get_args(hint)) if kind in plain), "NAME")
    text = METAVARS.get(f"{command} {last}") or METAVARS.get(last) or ("X" if name == "shares" else by_type)
    return f"{text} ..." if several and " " not in text else text


def shown_options(function: Callable[..., Any]) -> dict[str, list[str]]:
    """Return the options that the help of a command shows, by the titles of their groups."""
    own = [name for name in parameters(function) if name != "data_args"]
    if "training" in own:
        return {title: list(names) for title, names in FIT.items()}
    if "evaluation" in own:
        own = [name for name in own if name not in ("evaluation", "verbose")]
        return {"options": ["ckpt_path", *own], "data and devices": [*DATA, *DEVICES]}
    return {"options": own}


def short_help(command: str, function: Callable[..., Any]) -> str:
    """Return the text of `relvit COMMAND --help`."""
    parser, groups = Parser(), shown_options(function)
    parser.add_options_of(function)
    if len(groups) > 1:
        for cls, name in ((ImageFolderData, "data"), (ImageClassifier, "model"), (Trainer, "trainer")):
            parser.add_class_arguments(cls, name, fail_untyped=False)
        parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    actions, short = {action.dest: action for action in parser._actions}, short_names(command, function)
    shown = argparse.ArgumentParser(
        usage="\n       ".join(usage(command, function)),
        # `_described` also has a text for `python -OO`, which removes docstrings.
        description=_described(command, function),
        epilog=f"relvit {command} --help-all lists every option." if len(groups) > 1 else None,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=INDENT, width=WIDTH),
        add_help=False,
    )
    for title, names in groups.items():
        group = shown.add_argument_group(title)
        for name in names:
            own = short.get(name, name)
            action = actions.get(own)
            value = metavar(command, name, getattr(action, "_typehint", None))
            flags = [f"-{name[0]}"] if name == "quiet" else []
            options: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
            group.add_argument(*flags, f"--{name}", help=_text(command, own, action).replace("%", "%%"), **options)
    return shown.format_help().rstrip()


def _described(command: str, function: Callable[..., Any]) -> str:
    """Return what a command does, or its line of `relvit --help` if Python has removed the docstrings (-OO)."""
    if (text := inspect.getdoc(function)) is None:
        line = COMMANDS[command][1]
        text = f"{line[0].upper()}{line[1:]}."
    return text.partition("\n\nArgs:")[0]


def _text(command: str, name: str, action: argparse.Action | None) -> str:
    text = TEXTS.get(f"{command} {name}") or TEXTS.get(name)
    if text is not None or action is None:
        return text or ""
    text = action.help or ""
    if "." in name:
        # These options are arguments of classes, whose docstrings are long: show the first sentence, without "see ...".
        text = re.split(r"\.\s+(?=[A-Z])", text)[0].removesuffix(".") + "."
        text = re.sub(r", see (:\w+:)?`.*?`", "", text)
    allowed = choices(getattr(action, "_typehint", None))
    if any(each not in text for each in allowed):
        text = f"{text} One of {', '.join(allowed)}."
    # By default, commands other than `fit` take the values of `data.` options from the checkpoint, so their help shows
    # no default of these options.
    if action.default not in (None, False, "") and (command == "fit" or not name.startswith("data.")):
        text += f" Default: {action.default}."
    return text
