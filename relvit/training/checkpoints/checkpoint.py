"""What a relvit checkpoint remembers besides weights, and what it may be used for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer

from relvit.data import ImageData
from relvit.data.modules.registry import public_class_path
from relvit.training.checkpoints.file import KEY, read_checkpoint
from relvit.training.classifier import ImageClassifier
from relvit.version import __version__

# The arguments of `ImageClassifier` that say which network it is, and for which images and classes.
NETWORK = ("model", "model_kwargs", "retrofit", "num_classes", "in_chans", "img_size", "class_names")


class DescribeCheckpoint(Callback):
    """Writes into every checkpoint what is needed to use it elsewhere, in plain types.

    Under the key 'relvit': `model` (arguments of `ImageClassifier`, class names included), `data` (class and arguments
    of the data module: image size, normalisation and class names), `fit` and `versions`.

    Args:
        fit: other options of the training, in plain types.
    """

    def __init__(self, fit: Mapping[str, Any] | None = None) -> None:
        self.fit = dict(fit or {})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = {
            "model": {key: _plain(value) for key, value in pl_module.hparams.items()},
            "data": data_arguments(trainer.datamodule),
            "fit": self.fit,
            "versions": versions(),
        }


def data_arguments(data: ImageData) -> dict[str, Any]:
    """Class and arguments of a data module, in plain types."""
    class_path = public_class_path(f"{type(data).__module__}.{type(data).__qualname__}")
    return {"class_path": class_path, "init_args": data.init_args()}


def versions() -> dict[str, str]:
    """Versions of what has written a checkpoint."""
    return {
        "relvit": __version__,
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "lightning": lightning.__version__,
    }


def load_classifier(path: str | os.PathLike[str]) -> ImageClassifier:
    """The trained classifier of a checkpoint, on the CPU, in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: see `read_checkpoint`.
    """
    return classifier_of(read_checkpoint(path))


def classifier_of(content: dict[str, Any]) -> ImageClassifier:
    """The same of what `read_checkpoint` has read.

    Raises:
        ValueError: the arguments or weights that it holds do not make a model.
    """
    try:
        # What the training started from has been trained since.
        classifier = ImageClassifier(**content[KEY]["model"] | {"pretrained": None})
        classifier.load_state_dict(content["state_dict"])
    # The arguments are whatever the file says, and models meet wrong ones with almost any type.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the checkpoint does not make a model: {_cut(why, 300)}") from error
    return classifier.eval()


def check_same_network(path: str | Path, remembered: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to load a checkpoint into a network that it was not trained for.

    Args:
        path: where the checkpoint is, for the message.
        remembered: what `DescribeCheckpoint` wrote.
        asked: arguments of the `ImageClassifier` that is to receive the weights.

    Raises:
        ValueError: another architecture, other classes, another image size or number of channels, or weights that
            the training did not start from.
    """
    if difference := first_difference(remembered["model"], asked, (*NETWORK, "pretrained")):
        name, trained, wanted = difference
        raise ValueError(f"{path} was trained with {name} {trained}, not {wanted}: drop that option")


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]
) -> tuple[str, str, str] | None:
    """The first of these arguments that differs, and what it is on either side, in short; None where none does."""
    for name in names:
        # Checkpoints of before there was `retrofit` or `pretrained` do not hold it.
        ours, theirs = _plain(one.get(name)), _plain(other.get(name))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            differ = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
            ours, theirs = ({key: side.get(key) for key in differ} for side in (ours, theirs))
        # No arguments are as good as none, but for `retrofit`, where {} is a retrofit with the defaults.
        if ours != theirs and (ours or theirs or name == "retrofit"):
            return name, _short(ours), _short(theirs)
    return None


def check_same_data(path: str | Path, remembered: dict[str, Any], data: LightningDataModule) -> None:
    """Refuse to show a checkpoint images that it was not trained for; the size may differ.

    Raises:
        ValueError: other classes or another number of channels.
    """
    for name in ("class_names", "in_chans"):
        trained, given = remembered["model"][name], _plain(getattr(data, name))
        if trained is not None and trained != given:
            raise ValueError(f"{path} was trained with {name} {_short(trained)}, the data has {_short(given)}")


def _short(value: Any) -> str:
    return _cut(repr(value), 80)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
