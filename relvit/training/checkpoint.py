"""What a relvit checkpoint remembers besides weights, and what it may be used for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer

from relvit.training.checkpoint_file import KEY, read_checkpoint
from relvit.training.classifier import ImageClassifier
from relvit.version import __version__


class DescribeCheckpoint(Callback):
    """Writes into every checkpoint what is needed to use it elsewhere, in plain types.

    Under the key 'relvit': `model` (arguments of `ImageClassifier`, class names included), `data` (class and arguments
    of the data module: image size, normalisation and class names) and `versions`.
    """

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data = trainer.datamodule
        checkpoint[KEY] = {
            "model": {key: _plain(value) for key, value in pl_module.hparams.items()},
            "data": {"class_path": f"{type(data).__module__}.{type(data).__qualname__}", "init_args": data.init_args()},
            "versions": {
                "relvit": __version__,
                "torch": str(torch.__version__),
                "timm": timm.__version__,
                "lightning": lightning.__version__,
            },
        }


def load_classifier(path: str | Path) -> ImageClassifier:
    """The trained classifier of a checkpoint, on the CPU, in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: see `read_checkpoint`.
    """
    content = read_checkpoint(path)
    try:
        # What the training started from has been trained since.
        classifier = ImageClassifier(**content[KEY]["model"] | {"pretrained": None})
        classifier.load_state_dict(content["state_dict"])
    # The arguments are whatever the file says, and models meet wrong ones with almost any type.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} does not make a model: {_cut(why, 300)}") from error
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
    names = ("model", "model_kwargs", "retrofit", "num_classes", "in_chans", "img_size", "class_names", "pretrained")
    for name in names:
        # Checkpoints of before there was `retrofit` or `pretrained` do not hold it.
        trained, wanted = remembered["model"].get(name), _plain(asked[name])
        if isinstance(trained, dict) and isinstance(wanted, dict):
            differ = [key for key in {**trained, **wanted} if trained.get(key) != wanted.get(key)]
            trained, wanted = ({key: side.get(key) for key in differ} for side in (trained, wanted))
        # No arguments are as good as none, but for `retrofit`, where {} is a retrofit with the defaults.
        if trained != wanted and (trained or wanted or name == "retrofit"):
            raise ValueError(
                f"{path} was trained with {name} {_short(trained)}, not {_short(wanted)}: drop that option"
            )


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
