"""Where a training may start from: a relvit checkpoint, weights of timm, a file or a folder of weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.models import load_model_config_from_hf, load_state_dict, split_model_name_tag
from timm.models._hub import load_model_config_from_path

from relvit.models.factory import BUILDER_ARGUMENTS, DATA_ARGUMENTS, check_size
from relvit.models.weights.transfer import Weights
from relvit.training.checkpoints.file import KEY, read_checkpoint
from relvit.utils.messages import did_you_mean, listing, nearest
from relvit.utils.remote import is_address, local_file, suffix_of

HUB, FOLDER = "hf-hub:", "local-dir:"
CHECKPOINT, ARCHIVE = ".ckpt", ".npz"
FILES = (CHECKPOINT, ".safetensors", ".pth", ".pt", ".bin")
ALLOWED = (
    "a checkpoint of relvit fit, a file or folder of weights, or a model of timm such as "
    "'vit_small_patch16_224.augreg_in21k'"
)
# Differences of means and deviations, in units of the range 0..1, that a training hardly notices.
TOLERANCE = 0.05


class Architecture(NamedTuple):
    """The arguments of `ImageClassifier` that say which model it is."""

    model: str
    model_kwargs: dict[str, Any] | None = None
    retrofit: dict[str, Any] | None = None

    def changed(self, model_kwargs: dict[str, Any] | None, retrofit: dict[str, Any] | None) -> Architecture:
        """The same model with these arguments besides or instead, and this retrofit if there is one."""
        kwargs = {**(self.model_kwargs or {}), **(model_kwargs or {})}
        return Architecture(self.model, kwargs or None, self.retrofit if retrofit is None else retrofit)


def read_pretrained(pretrained: str) -> Weights:
    """The weights that `pretrained` names. Of files only tensors and plain values are read, never code.

    Args:
        pretrained: one of

            - a file: a checkpoint of `relvit fit` (.ckpt; its averaged weights where it has some), or plain weights
              (.safetensors, .pth, .pt, .bin ...) as timm reads them; or the remote address of one, such as https://...;
            - a folder as `timm.models.save_for_hf` writes it, config.json and weights; 'local-dir:FOLDER' is the same;
            - a model of timm, with the tag of its weights or without: 'vit_small_patch16_224.augreg_in21k', or
              'hf-hub:NAME' on the Hugging Face hub. These are downloaded, once.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a name that is none of these, or weights that cannot be had or read.
        DownloadError: a file that could not be fetched.
    """
    place, name = _resolve(pretrained)
    if place is None:
        return _from_timm(name)
    if suffix_of(place) == CHECKPOINT:
        content = read_checkpoint(place)
        model, data = content[KEY]["model"], content[KEY]["data"]["init_args"]
        size = model["img_size"] or data.get("img_size")
        return Weights(
            source=place,
            state={name.removeprefix("net."): tensor for name, tensor in content["state_dict"].items()},
            class_names=model["class_names"],
            input_size=(model["in_chans"], *((size, size) if isinstance(size, int) else size)) if size else None,
            mean=tuple(data.get("mean") or ()) or None,
            std=tuple(data.get("std") or ()) or None,
        )
    if suffix_of(place) == ARCHIVE:
        raise ValueError(f"{place} is a JAX archive: give its name in timm, or load it in Python and save it as .pth")
    with local_file(place) as path:
        try:
            return Weights(source=place, state=load_state_dict(str(path)))
        # Broken files are met with almost any type: TypeError, IndexError, UnicodeDecodeError, ...
        except Exception as error:
            raise ValueError(
                f"{place} cannot be read: it is damaged, holds no weights, or more than tensors and plain values"
            ) from error


def architecture_of(pretrained: str) -> Architecture:
    """The model that these weights are of; `pretrained` is as in `read_pretrained`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as `read_pretrained`, or a file of plain weights, which does not say it.
    """
    place, name = _resolve(pretrained)
    if place is not None and suffix_of(place) != CHECKPOINT:
        raise ValueError(f"{place} does not say which model it is of: give --model.model as well")
    if place is not None:
        model = read_checkpoint(place)[KEY]["model"]
        return Architecture(model["model"], model.get("model_kwargs"), model.get("retrofit"))
    if not name.startswith((HUB, FOLDER)):
        return Architecture(name)
    _, architecture, given = _config_of(name)
    kwargs = {key: value for key, value in given.items() if key not in {*DATA_ARGUMENTS, *BUILDER_ARGUMENTS}}
    return Architecture(architecture, kwargs or None)


def architecture_to_build(
    model: str | None, model_kwargs: dict[str, Any] | None, retrofit: dict[str, Any] | None, pretrained: str | None
) -> Architecture:
    """What to build: the model of that name; without a name what `pretrained` is of, but for the arguments given.

    Raises:
        FileNotFoundError, ValueError: see `architecture_of`.
    """
    if "pretrained" in (model_kwargs or {}):
        raise ValueError("model_kwargs must not hold 'pretrained': it is an option of its own, --model.pretrained")
    if model is not None or pretrained is None:
        return Architecture(model or "relvit_small", model_kwargs, retrofit)
    return architecture_of(pretrained).changed(model_kwargs, retrofit)


class Normalisation(NamedTuple):
    """Mean and standard deviation of each channel, in units of the range 0..1, as far as they are known."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def normalisation_of(pretrained: str) -> Normalisation:
    """What the images were normalised by on which these weights were trained; `pretrained` is as in `read_pretrained`.

    Raises:
        FileNotFoundError, ValueError: see `architecture_of`; plain weights do not say it.
    """
    place, name = _resolve(pretrained)
    if place is not None and suffix_of(place) != CHECKPOINT:
        return Normalisation()
    if place is not None:
        said = read_checkpoint(place)[KEY]["data"]["init_args"]
    elif name.startswith((HUB, FOLDER)):
        said = _config_of(name)[0]
    else:
        said = timm.get_pretrained_cfg(name).to_dict()
    try:
        return Normalisation(*(tuple(map(float, said.get(key) or ())) or None for key in Normalisation._fields))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{pretrained} has no mean and std of numbers ({error})") from error


def normalisation_note(weights: Weights, data: Any) -> str | None:
    """That the data are not normalised as the images were on which weights were trained; None where they are."""
    theirs, ours = {}, {}
    for name in Normalisation._fields:
        one, other = getattr(weights, name), getattr(data, name, None)
        if one and other and len(one) == len(other):
            pairs = zip(one, other, strict=True)
            if any(abs(a - b) > TOLERANCE for a, b in pairs):
                theirs[name], ours[name] = (
                    f"[{','.join(f'{value:g}' for value in values)}]" for values in (one, other)
                )
    if not theirs:
        return None
    given = " and ".join(f"{name} {value}" for name, value in ours.items())
    options = " ".join(f"--data.{name} '{value}'" for name, value in theirs.items())
    return f"Note: the images are normalised by {given}, those of the pretrained weights were by {options}"


def _config_of(name: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """What a folder's config.json, or one on the hub, says: about the weights, the model's name, its arguments."""
    source, _, place = name.partition(":")
    read = load_model_config_from_hf if f"{source}:" == HUB else load_model_config_from_path
    try:
        weights, architecture, arguments = read(place)
        return dict(weights or {}), architecture, dict(arguments or {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the config.json of {name} does not say which model it is of ({error!r})") from error


def _resolve(pretrained: str) -> tuple[str | None, str]:
    """A file's path or remote address, or None and a name for `timm.create_model`."""
    if pretrained.startswith(HUB):
        return None, pretrained
    if is_address(pretrained):
        return pretrained, pretrained
    path = Path(pretrained.removeprefix(FOLDER)).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            best = path / "checkpoints" / "best.ckpt"
            hint = f"give its checkpoint, {best}" if best.is_file() else "folders of weights that timm saves have one"
            raise ValueError(f"{path} holds no config.json: {hint}")
        return None, f"{FOLDER}{path}"
    if path.is_file():
        return str(path), pretrained
    if path.suffix in FILES or len(path.parts) > 1:
        raise FileNotFoundError(f"no weights at {pretrained}{_something_near(path)}; give {ALLOWED}")
    architecture, tag = split_model_name_tag(pretrained)
    if not timm.is_model(architecture):
        hint = did_you_mean(architecture, timm.list_models())
        raise ValueError(f"pretrained {pretrained!r} is no file, no folder and no model of timm{hint}; give {ALLOWED}")
    tags = [known for known in timm.list_pretrained() if known.startswith(f"{architecture}.")]
    if not tags:
        raise ValueError(f"there are no pretrained weights of {architecture}: give a checkpoint, or a model of timm")
    if tag and pretrained not in tags:
        raise ValueError(f"there are no weights {pretrained!r}{did_you_mean(pretrained, tags)}; known: {listing(tags)}")
    return None, pretrained


def _something_near(path: Path) -> str:
    """A hint at what there is instead of a path: something beside the first part of it that is missing, or in a run's
    folder of checkpoints there, or a model of timm of that name."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    places = {}
    for folder in (missing.parent / "checkpoints", missing.parent):
        if folder.is_dir():
            there = (entry for entry in folder.iterdir() if entry.is_dir() or entry.suffix in FILES)
            places |= {entry.name: entry for entry in there if not entry.name.startswith(".")}
    if name := nearest(missing.name, places, cutoff=0.6):
        return f" (did you mean '{places[name]}'?)"
    # Of a path only much the same name is meant as timm's, such as that of a repository on the hub.
    architecture, tag = split_model_name_tag(path.name)
    name = nearest(architecture, timm.list_models(), cutoff=0.8)
    known = f"{name}.{tag}" if name and timm.is_model_pretrained(f"{name}.{tag}") else name
    return f" (did you mean {known!r}?)" if known else ""


def _from_timm(name: str) -> Weights:
    """Of a model made by timm itself, whose own ways to fetch and convert files differ from model to model."""
    try:
        check_size(partial(timm.create_model, name), architecture_of(name).model_kwargs or {})
        donor = timm.create_model(name, pretrained=True)
    # A folder's config.json may say anything, and timm and the models meet that with almost any type.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the weights of {name} could not be loaded: {why}") from error
    cfg = donor.pretrained_cfg
    return Weights(
        source=name,
        state=donor.state_dict(),
        class_names=list(names) if (names := cfg.get("label_names")) else None,
        input_size=tuple(cfg["input_size"]),
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
    )
