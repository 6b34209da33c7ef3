"""Describe a classifier and the images of its training for its checkpoints; guess mean and std of unknown loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import timm
import torch
from lightning import LightningDataModule

from relvit.app.data import ImageData, parse_size
from relvit.app.data.class_labels import known_names
from relvit.app.data.recorded_arguments import IMAGES, plain_values
from relvit.app.data.registry import class_path_of
from relvit.app.training.checkpoints.checkpoint import Normalisation, versions
from relvit.app.training.checkpoints.upgrades import FORMAT
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.shown_text import counted

if TYPE_CHECKING:
    from relvit.app.training.classifier import ImageClassifier


def describe(classifier: ImageClassifier, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a classifier in plain types, from which model and data can be built again.

    The description holds `format` (see `upgrades.py`), `model` (the `arguments` of `ImageClassifier`, with the class
    names), `data` (class and arguments of the data module), `images` (classes and transforms, if the arguments in
    `data` do not describe them), `fit` (other options of the training), `versions` and, for a multi-label classifier,
    `thresholds`.
    """
    data = classifier.trainer.datamodule
    of_data = data_arguments(data)
    images = images_of_module(data) if isinstance(data, ImageData) else images_of_loaders(classifier, data)
    known, unknown = of_data["init_args"], object()
    return {
        "format": FORMAT,
        "model": plain_values(arguments) | {"class_names": known_names(classifier.hparams.class_names, data)},
        "data": of_data,
        "images": {name: value for name, value in images.items() if known.get(name, unknown) != value},
        "fit": classifier.fit_options,
        "versions": versions(),
        **classifier.labels.record(),
    }


def data_arguments(data: LightningDataModule | None) -> dict[str, Any]:
    """Return 'class_path' and 'init_args' of a data module in plain types; '' and {} if it is no `ImageData`."""
    if not isinstance(data, ImageData):
        return {"class_path": "", "init_args": {}}
    return {"class_path": class_path_of(type(data)), "init_args": data.recorded_args()}


def images_of_module(data: ImageData) -> dict[str, Any]:
    """Return the classes and the transforms of the images of a data module."""
    return plain_values({name: getattr(data, name) for name in IMAGES})


def images_of_loaders(classifier: ImageClassifier, data: LightningDataModule | None) -> dict[str, Any]:
    """Return the classes and the transforms, as far as they are known, of images from other loaders than relvit's.

    A LightningDataModule may have the attributes `class_names`, `mean`, `std` and `crop_pct`. If `mean`, `std` or
    `crop_pct` is missing, its value is assumed to be as in timm's description of the model, and the entry 'assumed'
    lists its name.
    """
    hparams, config = classifier.hparams, timm.data.resolve_model_data_config(classifier.net)
    channels = hparams.in_chans
    names = known_names(hparams.class_names, data) or range(hparams.num_classes)
    assumed: dict[str, Any] = {name: list(config[name]) for name in Normalisation._fields}
    if len(assumed["mean"]) != channels:
        assumed = dict.fromkeys(assumed, [0.5] * channels)
    assumed["crop_pct"] = config["crop_pct"]
    given = {name: list(values) for name, values in normalisation_of(data, channels)._asdict().items() if values}
    if (crop_pct := attribute_of(data, "crop_pct")) is not None:
        given["crop_pct"] = crop_pct
    size = parse_size(hparams.img_size or config["input_size"][1:])
    images = {"class_names": [str(name) for name in names], "img_size": list(size)} | assumed | given
    return images | {"assumed": [name for name in assumed if name not in given]}


def normalisation_of(data: Any, channels: int) -> Normalisation:
    """Return the attributes `mean` and `std` of a data module, of which each may be an array or one number.

    Raises:
        ValueError: `mean` or `std` has neither one number nor one for each channel.
    """
    found: list[tuple[float, ...] | None] = []
    for name in Normalisation._fields:
        if (value := attribute_of(data, name)) is None:
            found.append(None)
            continue
        numbers = torch.as_tensor(value, dtype=torch.float64).flatten()
        if len(numbers) not in (1, channels):
            raise ValueError(
                f"{name} of the data has {counted(len(numbers), 'number')} for images of "
                f"{counted(channels, 'channel')}: give one for each channel, or one for all"
            )
        found.append(tuple(numbers.expand(channels).tolist()))
    return Normalisation(*found)
