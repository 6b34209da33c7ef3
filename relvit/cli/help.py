"""The help of all commands; of those with hundreds of options the ones that matter, in groups."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, INDENT = 100, 34


class Option(NamedTuple):
    """A line of the help.

    Attributes:
        name: as it is typed.
        value: what follows it.
        text: a sentence.
        default: as it is shown; none: not shown, since the text says it or there is none.
    """

    name: str
    value: str
    text: str
    default: str | None = None


_ROOT = Option("--root", "DIR", "The folder of the images, where it is not the one that the checkpoint remembers.")
_CHECKPOINT = Option("CKPT, --ckpt_path", "CKPT", "The checkpoint to use, such as runs/RUN/checkpoints/best.ckpt.")
_IMAGES = (
    Option("--img_size", "SIZE", "The size of the images that the model gets: 288 or '[256,384]' (height, width)."),
    Option("--batch_size", "N", "The number of images in a batch, on each device."),
    Option("--num_workers", "N", "The number of processes that load images; 0 loads them in the main process."),
    Option("--data", "NAME", "Another kind of data than in training; --data.help NAME lists the options of a kind."),
)
_DEVICES = (
    Option("--devices", "N", "The number of devices (GPUs or CPU processes) to use.", "auto"),
    Option("--accelerator", "NAME", "The kind of device: auto, cpu, gpu or mps.", "auto"),
    Option("--precision", "NAME", "The number format: 32-true, bf16-mixed or 16-mixed.", "32-true"),
)
_RUNS = Option("--runs", "DIR", "The folder in which the results get a folder of their own.", "runs")
_MIRROR = Option("--mirror", "", "Average the probabilities of each image and its mirror image.")
_SKIP = "What to do about a file that cannot be read: error stops, skip goes on without it."

USAGE = {
    "fit": ("relvit fit --root DIR [options]", "relvit fit --config FILE [options]"),
    "validate": ("relvit validate CKPT [options]",),
    "test": ("relvit test CKPT [options]",),
    "predict": ("relvit predict CKPT [PATH ...] [options]",),
    "resolutions": ("relvit resolutions CKPT --sizes SIZE ... [options]",),
    "embed": ("relvit embed CKPT FOLDER --output FILE [options]",),
    "export": ("relvit export CKPT --output FILE [options]",),
    "average": ("relvit average CKPT CKPT ... --output FILE",),
    "check-data": ("relvit check-data FOLDER [options]", "relvit check-data --data NAME [options]"),
}

ABOUT = {
    "fit": "Train a model on images. The run gets a folder of its own: checkpoints, configuration, metrics, curves.",
    "validate": "Print accuracy and loss of a checkpoint on the images of val.",
    "test": "Test a checkpoint: metrics of each class, confusion matrix, the worst mistakes.",
    "predict": "Write the five most probable classes of each image into predictions.csv.",
    "resolutions": "Print the accuracy of a checkpoint at several image sizes.",
    "embed": "Write the features, from which the classifier decides, of all images below a folder.",
    "export": "Write the model to a file that needs no relvit, and compare the two at two image sizes.",
    "average": "Write a checkpoint whose weights are the mean of several checkpoints' weights.",
    "check-data": "Decode every image; list files that cannot be read, classes, sizes and images that come twice.",
}

# What comes below the options.
NOTES = {
    "check-data": "The exit status is 0 if all files can be read, 1 if one cannot, 2 for a wrong use of the command. "
    "Images that come twice do not change it.",
    **{
        command: f"relvit {command} --help-all lists every option, with those of Lightning's Trainer."
        for command in ("fit", "validate", "test", "predict")
    },
}

OPTIONS: dict[str, dict[str, Sequence[Option]]] = {
    "fit": {
        "data": (
            Option("--root", "DIR", "The folder of the images: DIR/train/CLASS/IMAGE, and val and test likewise."),
            Option(
                "--data",
                "NAME",
                "The kind of data: ImageFolderData (what --root alone means), ImageListData, ReaderData, ImageNetData, "
                "CIFAR10Data, CIFAR100Data or DigitsData; --data.help NAME lists the options of a kind.",
            ),
            Option("--img_size", "SIZE", "The size of the images that the model gets: 64 or '[64,96]'.", "224"),
            Option("--batch_size", "N", "The number of images in a batch, on each device.", "64"),
            Option("--num_workers", "N", "The number of processes that load images.", "2"),
            Option(
                "--data.augment",
                "NAME",
                "The augmentation of training images: none, shift, crop-flip, resized-crop, deit, three-augment or "
                "three-augment-crop.",
                "resized-crop",
            ),
            Option("--data.on_error", "WORD", _SKIP, "error"),
            Option("--data.cache", "BOOL", "Decode all images once and keep them in memory.", "false"),
        ),
        "model": (
            Option("--model", "NAME", "A model of relvit or timm; by default relvit_small, or that of --pretrained."),
            Option(
                "--model.model_kwargs.X",
                "VALUE",
                "An argument X of that model, such as rel_terms, max_distance or drop_path_rate.",
            ),
            Option(
                "--pretrained",
                "WEIGHTS",
                "The weights to start from: a checkpoint, the name of a model of timm, or a file or folder of weights.",
            ),
            Option("--model.retrofit.X", "VALUE", "An argument X of relvit.retrofit for timm's ViTs: rel_terms ..."),
            Option("--model.freeze_epochs", "N", "Train the classifier alone for the first N epochs.", "0"),
            Option("--model.ema_decay", "DECAY", "Keep a moving average of the weights, with a decay such as 0.9999."),
        ),
        "optimisation": (
            Option("--epochs", "N", "The number of epochs to train.", "100"),
            Option("--lr", "RATE", "The peak learning rate.", "0.001"),
            Option("--lr_find", "", "Find the learning rate by a range test of 100 steps first."),
            Option("--model.lr_base_batch", "N", "Scale the learning rate by the images in a step, relative to N."),
            Option("--model.warmup_epochs", "N", "The number of epochs in which the learning rate rises.", "5"),
            Option("--model.opt", "NAME", "An optimiser of timm, such as adamw, lamb, lion, muon or sgd.", "adamw"),
            Option("--model.weight_decay", "X", "The weight decay of the optimiser.", "0.05"),
            Option("--model.layer_decay", "X", "Multiply the learning rate by X from each layer to the one below it."),
            Option("--model.label_smoothing", "X", "The share of each target that goes to all classes.", "0.1"),
            Option("--model.mixup", "X", "Mix pairs of images with this strength, such as 0.8.", "0"),
            Option("--model.cutmix", "X", "Paste parts of images into others with this strength, such as 1.", "0"),
            Option("--trainer.gradient_clip_val", "X", "Scale gradients down to this norm, such as 1."),
            Option("--trainer.accumulate_grad_batches", "N", "Take one optimiser step for N batches.", "1"),
            Option("--patience", "N", "Stop after N validations without a better accuracy."),
        ),
        "run and devices": (
            Option("--config", "FILE", "A configuration in YAML; of several, later ones override earlier ones."),
            Option("--runs", "DIR", "The folder in which the run gets a folder of its own.", "runs"),
            Option("--resume", "RUN", "Continue the training in the folder of that run, with its configuration."),
            Option("--save_every", "N", "Save a checkpoint after every N optimiser steps, besides each epoch."),
            Option("--seed_everything", "N", "The seed of all random numbers.", "0"),
            Option("-q, --quiet", "", "Show no progress: neither a bar nor a line for each epoch."),
            *_DEVICES,
        ),
    },
    "validate": {"images": (_CHECKPOINT, _ROOT, *_IMAGES), "devices": _DEVICES},
    "test": {
        "images": (
            _CHECKPOINT,
            Option("--split", "SPLIT", "The images to use: those of train, val or test.", "test"),
            _ROOT,
            *_IMAGES,
            Option("--data.on_error", "WORD", f"{_SKIP} By default as in training."),
            _MIRROR,
        ),
        "results and devices": (_RUNS, *_DEVICES),
    },
    "predict": {
        "images": (
            _CHECKPOINT,
            Option(
                "PATH ...",
                "",
                "Image files, folders (with all below them) and patterns such as 'photos/*.jpg'; by default the images "
                "of test or else val, where the checkpoint was trained.",
            ),
            Option("--root", "DIR", "Without PATH: the folder of the images, with or without class folders."),
            *_IMAGES,
            Option("--data.on_error", "WORD", _SKIP, "skip"),
            _MIRROR,
        ),
        "results and devices": (_RUNS, *_DEVICES),
    },
}


OPTIONS |= {
    "resolutions": {
        "options": (
            _CHECKPOINT,
            Option("--sizes", "SIZE ...", "The image sizes in pixels: 24 32 '[32,48]' (height, width)."),
            Option("--split", "SPLIT", "The images to use: those of train, val or test.", "val"),
            _ROOT,
            Option("--batch_size", "N", "The number of images in a batch; by default as in training."),
            Option("--accelerator", "NAME", "The kind of device: auto, cpu, gpu or mps.", "auto"),
            Option("--output", "FILE", "A CSV file to which the table is written, too."),
        )
    },
    "embed": {
        "options": (
            _CHECKPOINT,
            Option("FOLDER, --root", "FOLDER", "The folder whose images are read, with all folders in it."),
            Option("--output", "FILE", "The file to write: its name ends in .npz, .csv or .parquet."),
            Option("--img_size", "SIZE", "The size of the images that the model gets; by default as in training."),
            Option("--batch_size", "N", "The number of images in a batch.", "64"),
            Option("--num_workers", "N", "The number of processes that read images; 0 reads in the main process.", "2"),
            Option("--device", "NAME", "The device that computes, such as cpu or cuda:1.", "auto"),
        )
    },
    "export": {
        "options": (
            _CHECKPOINT,
            Option("--output", "FILE", "The file to write: its name ends in .onnx or .pt2 (torch.export)."),
            Option("--img_size", "SIZE", "The size of a model that takes only one; by default as in training."),
        )
    },
    "average": {
        "options": (
            Option("CKPT ...", "", "The checkpoints; of each its moving average is used where it has one."),
            Option("--ckpt_paths", "LIST", "The same as a list: '[a.ckpt,b.ckpt]'."),
            Option("--output", "FILE", "The file to write: a new one whose name ends in .ckpt."),
        )
    },
    "check-data": {
        "options": (
            Option("FOLDER, --root", "FOLDER", "The folder that holds train/CLASS/IMAGE, and val and test likewise."),
            Option("--data", "NAME", "Another kind of data, with its options: --data NAME --data.OPTION VALUE."),
            Option("--processes", "N", "The number of processes that decode; by default one for each core."),
            Option("--output", "FILE", "A JSON file to which all results are written."),
        )
    },
}


def asks_help(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for the short help."""
    return any(argument in ("-h", "--help") for argument in arguments)


def short_help(command: str) -> str:
    """The text of `relvit COMMAND --help`."""
    lines = [f"{'usage:' if place == 0 else '':<6} {usage}" for place, usage in enumerate(USAGE[command])]
    lines += ["", ABOUT[command]]
    for title, options in OPTIONS[command].items():
        lines += ["", f"{title}:"]
        for option in options:
            lines += _shown(option)
    if command in NOTES:
        lines += ["", *textwrap.wrap(NOTES[command], WIDTH)]
    return "\n".join(lines)


def _shown(option: Option) -> list[str]:
    text = option.text if option.default is None else f"{option.text} Default: {option.default}."
    head = f"  {option.name} {option.value}".rstrip()
    wrapped = textwrap.wrap(text, WIDTH - INDENT, break_on_hyphens=False)
    if len(head) + 2 > INDENT:
        wrapped.insert(0, "")
    first, *rest = wrapped
    return [f"{head:<{INDENT}}{first}".rstrip(), *(" " * INDENT + line for line in rest)]
