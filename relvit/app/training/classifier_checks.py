"""Checks of `ImageClassifier`: arguments without effect or in contradiction, and data that a model cannot take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from relvit.app.data import parse_size
from relvit.app.data.class_labels import names_in
from relvit.app.data.recorded_arguments import plain_values
from relvit.app.data.shape import ImageShape
from relvit.app.models import check_image_size
from relvit.app.training.checkpoints.description import normalisation_of
from relvit.app.training.optim.distillation import Distill
from relvit.app.training.optim.gradients import NonFinite
from relvit.app.training.optim.optimizer import check_optimizer
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import check_choice, did_you_mean, listing


def plain_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `ImageClassifier` in plain types, as every checkpoint can hold them.

    Raises:
        TypeError: An argument is an array of NumPy; `class_names` is one text, or a dict; or an argument of the model
            or optimiser is, for example, a class.
        ValueError: `class_names` holds a name twice.
    """
    for name, value in given.items():
        # Lightning's `save_hyperparameters` compares all arguments with each other, which fails for arrays.
        if isinstance(value, np.ndarray):
            raise TypeError(f"{name} is an array of NumPy: give a list, by {name}.tolist()")
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in given.items()}
    if plain["class_names"] is not None:
        plain["class_names"] = names_in(plain["class_names"])
    found = plain_values(plain)
    for name in ("model_kwargs", "retrofit", "opt_kwargs"):
        lost = set(plain[name]) - set(plain_values(plain[name])) if isinstance(plain[name], Mapping) else ()
        for key in sorted(lost):
            raise TypeError(
                f"{name} holds {key!r}: {plain[name][key]!r}, but checkpoints hold only numbers, texts, lists and "
                "dictionaries: give one of these, or register a model of your own, see docs/own_position.md"
            )
    return found


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of `ImageClassifier` that contradict each other or have no effect.

    Raises:
        ValueError: `class_names` does not hold `num_classes` names; `min_lr` is not in 0 <= x <= lr; or `teacher` is
            given with `multi_label`, or a class name contains ';'.
        ValueError: An option is given without the option that it belongs to, such as `distill` without `teacher`; or a
            name is unknown.
    """
    names, count = given["class_names"], given["num_classes"]
    if names is not None and len(names) != count:
        raise ValueError(
            f"class_names holds {counted(len(names), 'name')}, num_classes is {count}: give one name for each class"
        )
    lr, min_lr = given["lr"], given["min_lr"]
    if not 0 <= min_lr <= lr:
        raise ValueError(
            f"need 0 <= min_lr <= lr, got min_lr {min_lr} and lr {lr}: give a min_lr (the rate at the end of the "
            "training) of at most lr, such as 0"
        )
    if given["multi_label"]:
        _check_separable(names or ())
    if given["multi_label"] and given["teacher"]:
        raise ValueError("a teacher is for images of one label each: leave out teacher, or multi_label")
    mixup, cutmix = given["mixup"], given["cutmix"]
    for name, default, needed, there in (
        ("mix_prob", 1.0, "mixup or cutmix", mixup or cutmix),
        ("mix_switch_prob", 0.5, "mixup and cutmix", mixup and cutmix),
        ("ema_warmup", True, "ema_decay", given["ema_decay"] is not None),
        ("distill", "hard", "teacher", given["teacher"]),
        ("distill_weight", 0.5, "teacher", given["teacher"]),
        ("distill_temperature", 3.0, "distill 'soft'", given["distill"] == "soft"),
    ):
        if given[name] != default and not there:
            raise ValueError(f"{name} {given[name]} has no effect without {needed}: give both or neither")
    backend = given["compile"]
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        # The error also offers these two of the debugging backends, which `list_backends` leaves out by default.
        offered = [*torch.compiler.list_backends(), "eager", "aot_eager"]
        raise ValueError(
            f"unknown backend of torch.compile {backend!r}{did_you_mean(backend, offered)}: give True, False or one of "
            f"{listing(offered)}"
        )
    check_optimizer(given["opt"], given["layer_decay"], given["opt_kwargs"])
    check_choice("nonfinite", given["nonfinite"], get_args(NonFinite))
    check_choice("distill", given["distill"], get_args(Distill))


def check_labels(data: Any, hparams: Mapping[str, Any], several: bool, stage: str) -> None:
    """Refuse data whose labels mean something else than the model's outputs.

    Raises:
        ValueError: The data have one label per image and the model is for several, or the reverse.
        ValueError: The data have other classes than the model, or the same classes in another order, or a name twice,
            or with several labels a name that contains ';'.
        TypeError: The names of the data's classes are one text, or a dict.
    """
    if stage == "predict":
        return
    names = attribute_of(data, "class_names")
    if names is not None:
        _check_classes(names_in(names), hparams["class_names"], hparams["num_classes"])
        if several:
            _check_separable(names)
    found = attribute_of(data, "multi_label")
    if found is not None and found != several:
        raise ValueError(
            f"the model is for {'several labels' if several else 'one label'} per image (multi_label {several}), the "
            f"data have {'several' if found else 'one'} (multi_label {found}): give both the same multi_label (for "
            "lists of images on the command line: --data.label_separator)"
        )


def _check_separable(names: Iterable[str]) -> None:
    if joined := [name for name in names if ";" in str(name)]:
        raise ValueError(
            f"the class name {joined[0]!r} contains ';', which stands between the classes of an image in the tables of "
            "a model for several labels: rename it"
        )


def _check_classes(found: list[str], names: list[str] | None, count: int) -> None:
    if len(found) != count:
        raise ValueError(
            f"the data have {counted(len(found), 'class')} (class_names), the model has {count} (num_classes): give "
            "data with the model's classes, or train a model with the classes of the data"
        )
    for index, (one, other) in enumerate(zip(found, names or found, strict=True)):
        if one != other:
            raise ValueError(
                f"class {index} is {one!r} in the data and {other!r} in the model: give both the same class_names, in "
                "the same order"
            )


def check_images(net: nn.Module, data: Any, hparams: Mapping[str, Any], stage: str) -> None:
    """Refuse data with images or labels that a model does not take.

    To check an image size, the model computes one image of this size. The checks read the attributes `class_names`,
    `multi_label`, `shape`, `img_size`, `train_sizes`, `mean` and `std` of the data module; an attribute that the module
    lacks is not checked.

    Raises:
        ValueError: The labels of the data do not fit the model, see `check_labels`, nor `mean` or `std` the channels.
        ValueError: The model does not take `img_size` or one of `train_sizes` of the data, or does not take native
            shapes.
        ValueError: The data have native shapes, and 'mixup', 'cutmix' or 'teacher' is set in a training, which need
            images of one size.
    """
    check_labels(data, hparams, hparams["multi_label"], stage)
    normalisation_of(data, hparams["in_chans"])
    shape = attribute_of(data, "shape")
    if isinstance(shape, ImageShape) and not shape.fixed:
        parts = [name for name in ("mixup", "cutmix", "teacher") if stage == "fit" and hparams[name]]
        if parts:
            raise ValueError(
                f"{parts[0]} needs images of one size, the data have {shape.words()}: leave out {parts[0]}, or give "
                "the data one size"
            )
        shape.check_model(net, hparams["in_chans"])
        return
    for size in (attribute_of(data, "img_size"), *((stage == "fit" and attribute_of(data, "train_sizes")) or ())):
        if size is not None:
            check_image_size(net, parse_size(size), hparams["in_chans"], hparams["img_size"])
