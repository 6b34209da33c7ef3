"""Publish a trained classifier in timm's own format: a folder or a Hugging Face repository."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from timm.layers import to_2tuple
from timm.models import save_for_hf
from torch import nn

from relvit.app.data.class_labels import names_in
from relvit.app.evaluation.deploy.card import missing_parts, model_card, read_curve
from relvit.app.evaluation.predictor import Predictor
from relvit.app.models import patch_size_of
from relvit.app.training.labels import labels_of
from relvit.app.utils.defaults import torch_defaults
from relvit.app.utils.files import atomic_folder, check_writable, is_address, parse_json
from relvit.app.utils.shown_text import counted, one_line
from relvit.utils.messages import an
from relvit.version import __version__

HUB, FOLDER = "hf-hub:", "local-dir:"
# Under this key in config.json relvit stores values that timm's format does not have.
KEY = "relvit"


class PublishError(RuntimeError):
    """A model that timm cannot build and load from its folder, or only with other outputs."""


@torch_defaults()
def publish_model(
    ckpt_path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    license: str | None = None,
    curve: str | os.PathLike[str] | None = None,
    tell: Callable[[list[str]], object] = lambda missing: None,
) -> str:
    """Write `model.safetensors`, `config.json` and the model card `README.md`, from which timm builds the same model.

    The published weights are the weights that evaluation uses: the averaged weights if the training kept an average.
    The temperature of a calibrated checkpoint and the thresholds of a multi-label checkpoint are not part of the
    weights, but are in the card and in `config.json`. Before the files are published, `timm.create_model` loads them,
    and the model is compared with the checkpoint, bit by bit.

    Args:
        ckpt_path: a checkpoint of `relvit fit`. For `best.ckpt` in the folder of a run, the card contains the metrics
            in the run's `summary.json`.
        to: a folder, also as 'local-dir:FOLDER', or 'hf-hub:OWNER/NAME'. The repository is created if it does not
            exist, and gets a commit; the user has to be logged in to the hub (`hf auth login`).
        license: identifier of the licence of the weights, such as 'apache-2.0'; None: the card states that no licence
            is given.
        curve: file that `relvit resolutions --output FILE.json` wrote, with this checkpoint; None: `resolutions.json`
            in the folder of the run, if the file is there and newer than the checkpoint.
        tell: function that is called at the end with a list of what the card lacks, and how to add it.

    Returns:
        The name that `timm.create_model(NAME, pretrained=True)` takes, after `import relvit`.

    Raises:
        FileNotFoundError, ValueError: the file at `ckpt_path` or `curve` is missing or cannot be read.
        ValueError: `to` is a name that no repository of the hub can have, the path of a file, or a remote address other
            than the hub.
        ValueError: the folder `to` contains files but no published model, or is the current folder or a mount point.
        PublishError: timm does not build the same model from the files; nothing is published.
    """
    to = os.fspath(to).removeprefix(FOLDER)
    hub = to.startswith(HUB)
    if hub:
        validate_repo_id(to.removeprefix(HUB))
    else:
        check_folder(to)
    predictor = Predictor(ckpt_path)
    # The model card shows how to predict an image file, so the model has to take images of 1 or 3 channels.
    predictor.check_channels()
    rows = read_curve(predictor.checkpoint.path, curve)
    with TemporaryDirectory() if hub else atomic_folder(to) as folder:
        save_folder(predictor, folder, license)
        name = f"{FOLDER}{Path(to).absolute().name}"
        if hub:
            api = HfApi(library_name="relvit", library_version=__version__)
            repository = api.create_repo(to.removeprefix(HUB), exist_ok=True).repo_id
            name = f"{HUB}{repository}"
        (Path(folder) / "README.md").write_text(model_card(predictor, name, license, rows), encoding="utf-8")
        if hub:
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Publish the model with relvit")
    tell(missing_parts(predictor.checkpoint, license, rows))
    return name if hub else f"{FOLDER}{to}"


def check_folder(to: str) -> None:
    """Refuse a folder with any files other than a published model.

    Raises:
        ValueError: the folder is not empty and holds no published model, or `to` is a file or a remote address.
        NotADirectoryError: a part of the path is a file.
        PermissionError: the parent of the folder cannot be written to.
    """
    path = Path(to)
    if is_address(to) or (path.exists() and not path.is_dir()):
        raise ValueError(f"cannot publish to {to}: give a folder of this machine, or hf-hub:OWNER/NAME")
    if path.is_dir() and any(path.iterdir()) and KEY not in _config(path):
        raise ValueError(f"{to} is not empty and holds no model that relvit published: give a new folder")
    # `atomic_folder` writes beside the folder, and then exchanges the two.
    check_writable(path.resolve().parent, "give a folder elsewhere (--to)")


def save_folder(predictor: Predictor, folder: str | os.PathLike[str], license: str | None = None) -> None:
    """Write `model.safetensors` and `config.json` of a checkpoint's model, see `save_model`.

    Raises the errors of `save_model`.
    """
    about: dict[str, Any] = {"version": __version__}
    net = predictor.to("cpu").model
    if (temperature := predictor.classifier.temperature) != 1:
        about["temperature"] = temperature
    about |= predictor.labels.record()
    if not predictor.shape.fixed:
        about |= predictor.shape.record()
    save_model(net, folder, predictor.class_names, license, about)


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    class_names: Sequence[str],
    license: str | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Save a model of `timm.create_model` as `model.safetensors` and `config.json`, for timm and `transformers`.

    `publish_model` publishes a checkpoint of `relvit fit`; this function saves a model that was trained in another way,
    such as a model with merged adapters. timm's `save_for_hf` writes the files, `timm.create_model` loads them, and the
    outputs of the loaded model are compared bit by bit with the outputs of `model`: at the `input_size`, and, if the
    model takes images of any size, also at another size.

    Args:
        model: a model of timm or relvit, also after `relvit.retrofit`; it is moved to the CPU and put into evaluation
            mode. Its `pretrained_cfg` describes the images: `input_size`, `mean`, `std`, `crop_pct`. If the model was
            made with `img_size`, which some names imply, `img_size` is written as its `input_size`.
        folder: the folder to write to. Existing files with the same names are replaced in one step; all other files
            stay.
        class_names: name of each class; the label of a class is its index in this list.
        license: identifier of the licence of the weights; None: unknown.
        about: further values for `config.json`, such as the 'thresholds' of a multi-label model.

    Raises:
        TypeError: `model` wraps a model, as `torch.compile(model)` does; or `class_names` is one text, or a dict.
        ValueError: the number of class names differs from the number of the model's classes.
        PublishError: timm cannot save the model or build it from the files, the model does not take images of its
            `input_size`, or the outputs differ.
        OSError: the files cannot be written.
    """
    # `torch.compile` keeps the model in the first of these attributes, wrappers for several devices in the second.
    for inner in ("_orig_mod", "module"):
        if inner in model._modules:
            raise TypeError(f"model is {an(type(model).__name__)}, which wraps a model: give that one, model.{inner}")
    names = names_in(class_names)
    if len(names) != model.num_classes:
        raise ValueError(
            f"class_names has {counted(len(names), 'name')}; give {model.num_classes}, one for each class of the model"
        )
    config = {
        "label_names": names,
        "pretrained_cfg": {"license": license or "unknown"},
        KEY: {"version": __version__} if about is None else about,
    }
    if about is not None and "thresholds" in about:
        # Without `problem_type`, `transformers` would compute softmax probabilities, and the cross-entropy in training.
        config["problem_type"] = labels_of(about["thresholds"]).problem_type
    # Make all tensors contiguous, because safetensors only takes contiguous ones.
    model.eval().to("cpu", memory_format=torch.contiguous_format)
    with atomic_folder(folder) as part:
        try:
            save_for_hf(model, part, model_config=config, safe_serialization=True)
            _correct_config(part / "config.json")
            # safetensors writes files that only their owner can read, so give the weights the permissions of
            # config.json.
            shutil.copymode(part / "config.json", part / "model.safetensors")
            again = timm.create_model(f"{FOLDER}{part}", pretrained=True).eval()
        except OSError:
            raise
        # Catch everything else, since timm and the models raise errors of almost any type. For a full disk, safetensors
        # raises its own error type, so the message does not blame the model.
        except Exception as error:
            raise PublishError(f"timm could not save the model and build it again: {one_line(error)}") from error
        _compare(model, again)


def _compare(model: nn.Module, again: nn.Module) -> None:
    """Compare the outputs of a model with those of the model that timm built from its files, bit by bit.

    Raises:
        PublishError: the outputs differ, or the model does not take images of its `input_size`.
    """
    channels, *size = again.pretrained_cfg["input_size"]
    # timm builds models in float32, also from weights of another dtype, so convert the new model.
    dtype = next(model.parameters()).dtype
    again.to(dtype)
    sizes = [size]
    # A reach does not change the outputs at the size of the training, so compare the outputs at another size, too.
    if getattr(model, "dynamic_img_size", False):
        (height, width), (rows, columns) = size, patch_size_of(model)
        sizes.append([(height // rows + 1) * rows, (width // columns + 3) * columns])
    for height, width in sizes:
        images = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        try:
            with torch.no_grad():
                expected, found = model(images), again(images)
        except Exception as error:
            raise PublishError(
                f"the model does not take images of model.pretrained_cfg['input_size'], which is {(channels, *size)}: "
                f"{one_line(error)}; set it to (channels, height, width) of the training's images"
            ) from error
        if not torch.equal(found, expected):
            difference = float((found - expected).abs().max())
            raise PublishError(
                f"the model that timm builds from the files has outputs that differ by {difference:.1e} for images of "
                f"{height} x {width} pixels: nothing is published; if the model has a reach, which timm's format does "
                "not hold, call relvit.models.set_reach(model, 'trained') first, and set the reach again after loading"
            )


def _correct_config(path: Path) -> None:
    """Remove the number of classes from the model's arguments in `config.json`, and write `img_size` as `input_size`.

    timm writes the number at the top level of `config.json` and in `model_args`, and reads both. The timm wrapper of
    `transformers` passes the number at the top level to timm together with `model_args`, and fails if `model_args`
    contains the number, too.

    timm reads `img_size` as `input_size`, too, but only for models that take images of one size. Absolute embeddings
    of any model are resized from the grid of `input_size`.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model_args"].pop("num_classes", None)
    if img_size := config["model_args"].get("img_size"):
        described = config["pretrained_cfg"]
        described["input_size"] = [described["input_size"][0], *to_2tuple(img_size)]
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
