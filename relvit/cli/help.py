"""The short help of each command: the options that matter, with the texts and defaults of the code itself."""

from __future__ import annotations

import argparse
import inspect
import re
from functools import partial
from typing import get_args

from lightning import Trainer

from relvit.cli.aliases import ALIASES, USAGE
from relvit.cli.fit.fit import add_fit_options
from relvit.cli.parser import SHARED, Parser, function_of
from relvit.cli.trainer.options import TRAINER_DEFAULTS
from relvit.data import ImageFolderData
from relvit.data.modules.registry import data_modules
from relvit.data.transforms import Augment
from relvit.training import ImageClassifier

WIDTH, INDENT = 100, 34

_IMAGES = ("img_size", "batch_size", "num_workers", "data")
_DEVICES = ("devices", "accelerator", "precision")
# Of commands with hundreds of options those that matter, by groups; the other commands show all that they have.
SHOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "fit": {
        "data": ("root", *_IMAGES, "data.augment", "data.on_error", "data.cache"),
        "model": (
            *("model", "model.model_kwargs.X", "pretrained", "model.retrofit.X", "model.freeze_epochs"),
            "model.ema_decay",
        ),
        "optimisation": (
            *("epochs", "lr", "lr_find", "model.lr_base_batch", "model.warmup_epochs", "model.opt"),
            *("model.weight_decay", "model.layer_decay", "model.label_smoothing", "model.mixup", "model.cutmix"),
            *("trainer.gradient_clip_val", "trainer.accumulate_grad_batches", "patience"),
        ),
        "run and devices": ("config", "runs", "resume", "save_every", "seed_everything", "quiet", *_DEVICES),
    },
    "validate": {"images": ("ckpt_path", "root", *_IMAGES, "reach"), "devices": _DEVICES},
    "test": {
        "images": ("ckpt_path", "split", "root", "robustness", *_IMAGES, "reach", "data.on_error", "mirror"),
        "results and devices": ("runs", *_DEVICES),
    },
    "predict": {
        "images": ("ckpt_path", "paths", "root", *_IMAGES, "reach", "data.on_error", "mirror", "step_maps"),
        "results and devices": ("runs", *_DEVICES),
    },
}
# What is not in the signature of a class or function, or explained there at a length for Python.
TEXTS = {
    "resolutions ckpt_path": "The checkpoints to compare, one or several of the same classes and images.",
    "config": "A configuration in YAML, or one of relvit's by its name, such as digits; later ones override "
    "earlier ones.",
    "seed_everything": "The seed of all random numbers. Default: 0.",
    "predict paths": "Image files, folders (with all below them) and patterns such as 'photos/*.jpg'; by default "
    "the images of test or else val, where the checkpoint was trained.",
    "data": f"The kind of data: {', '.join(sorted(cls.__name__ for cls in data_modules()))}; --data.help NAME lists "
    "the options of a kind. --root alone means ImageFolderData.",
    "data.root": "The folder of the images: DIR/train/CLASS/IMAGE, and val and test likewise.",
    "data.augment": f"The augmentation of training images: {', '.join(get_args(Augment))}. Default: resized-crop.",
    "data.cache": "Decode all images once and keep them in memory. Default: false.",
    "data.on_error": "What to do about a file that cannot be read: error stops, skip goes on without it. By default "
    "trainings stop, predict goes on.",
    "model.model": "A model of relvit or timm; by default relvit_small, or that of --pretrained.",
    "model.model_kwargs.X": "An argument X of that model, such as rel_terms, max_distance or drop_path_rate.",
    "model.pretrained": "The weights to start from: a checkpoint, the name of a model of timm, or a file or folder of "
    "weights.",
    "model.lr_base_batch": "Scale the learning rate by the images in a step, relative to N.",
    "model.retrofit.X": "An argument X of relvit.retrofit for timm's ViTs: rel_terms ...",
    "trainer.devices": "The number of devices (GPUs or CPU processes) to use. Default: auto.",
    "trainer.accelerator": "The kind of device: auto, cpu, gpu or mps. Default: auto.",
    "trainer.precision": "The number format: 32-true, bf16-mixed or 16-mixed. Default: 32-true.",
}
# What stands for the value of an option ("": it needs none); of other options N, X, BOOL or NAME, by their types.
VALUES = dict.fromkeys(("quiet", "lr_find", "mirror", "step_maps", "random", "int8", "aot"), "") | dict.fromkeys(
    ("seed_everything", "devices"), "N"
)
VALUES |= dict.fromkeys(("root", "runs", "robustness"), "DIR") | dict.fromkeys(("config", "output"), "FILE")
VALUES |= {"ckpt_path": "CKPT", "ckpt_paths": "CKPT ...", "paths": "PATH ...", "resume": "RUN", "X": "VALUE"}
VALUES |= {"to": "DIR|hf-hub:OWNER/NAME", "license": "ID", "curve": "FILE.json"}
VALUES |= {
    "img_size": "SIZE",
    "sizes": "SIZE ...",
    "pretrained": "WEIGHTS",
    "models": "CKPT|MODEL ...",
    "shares": "X ...",
}
# Of one command.
VALUES |= {"show output": "DIR", "probe output": "FILE|DIR", "resolutions output": "FILE|DIR"}
VALUES |= {"images": "IMAGE ...", "kind": "KIND ...", "patch": "ROW COLUMN"}
ALL = "relvit {} --help-all lists every option, with those of Lightning's Trainer."
STATUS = "The exit status is 0 if all files can be read, 1 if one cannot, 2 for a wrong use of the command."


def short_help(command: str, module: str, summary: str) -> str:
    """Return the text of `relvit COMMAND --help`.

    Args:
        command: its name.
        module: the module that runs it, whose function of that name has the options as arguments, if it has one.
        summary: what the command does.
    """
    parser, groups = Parser(), SHOWN.get(command)
    if groups is None:
        function = function_of(module, command)
        parser.add_options_of(function)
        groups = {"options": tuple(inspect.signature(function).parameters)}
    else:
        if command == "fit":
            add_fit_options(parser)
        else:
            parser.add_options_of(function_of(module, command), skip={"evaluation"})
        for cls, name in ((ImageFolderData, "data"), (ImageClassifier, "model"), (Trainer, "trainer")):
            parser.add_class_arguments(cls, name, fail_untyped=False)
        parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    actions = {action.dest: action for action in parser._actions}
    shown = argparse.ArgumentParser(
        usage="\n       ".join(USAGE[command]),
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=ALL.format(command) if command in SHOWN else STATUS if command == "check-data" else None,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=INDENT, width=WIDTH),
        add_help=False,
    )
    for title, names in groups.items():
        group = shown.add_argument_group(title)
        for name in names:
            own = ALIASES.get(command, {}).get(f"--{name}", f"--{name}").lstrip("-")
            text = _text(command, name, own, actions.get(own))
            last = name.rpartition(".")[2]
            value = VALUES.get(f"{command} {last}", VALUES.get(last, _type_of(actions.get(own))))
            flags = [f"-{name[0]}"] if name == "quiet" else []
            options = {"metavar": value} if value else {"action": "store_true"}
            group.add_argument(*flags, f"--{name}", help=text.replace("%", "%%"), **options)
    return shown.format_help().rstrip()


def _text(command: str, name: str, own: str, action: argparse.Action | None) -> str:
    text = TEXTS.get(f"{command} {name}") or TEXTS.get(own) or (SHARED.get(own) if action is None else None)
    if text is not None or action is None:
        return text or ""
    text = action.help
    if "." in own:
        # Of docstrings for Python the first sentence.
        text = re.split(r"\.\s+(?=[A-Z])", text)[0].removesuffix(".") + "."
    # What a checkpoint was trained with is the default of the commands that use it.
    if action.default not in (None, False, "") and (command == "fit" or not own.startswith("data.")):
        text += f" Default: {action.default}."
    return text


def _type_of(action: argparse.Action | None) -> str:
    hint = getattr(action, "_typehint", None)
    plain = {int: "N", float: "X", bool: "BOOL"}
    return next((plain[kind] for kind in (hint, *get_args(hint)) if kind in plain), "NAME")
