"""Read pretrained weights to start from: a relvit checkpoint, a model of timm, a file or folder of weights."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_model_config_from_hf, load_state_dict, split_model_name_tag
from timm.models._hub import load_model_config_from_path
from torch import Tensor, nn

from relvit.app.data import parse_size
from relvit.app.data.class_labels import known_names
from relvit.app.models import check_model_size, described_model
from relvit.app.models.hub import hub_access
from relvit.app.models.model_names import model_hint
from relvit.app.training.checkpoints.checkpoint import Architecture, Checkpoint, Normalisation
from relvit.app.training.checkpoints.description import normalisation_of
from relvit.app.training.checkpoints.file import (
    FILES,
    FOLDER,
    HUB,
    ArchiveError,
    check_archive,
    check_is_file,
    nearest_hint,
)
from relvit.app.training.checkpoints.tensors import check_finite, check_tensors
from relvit.app.training.checkpoints.upgrades import KEY
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.files import is_address, is_exported, not_for_exported, parse_json
from relvit.app.utils.nested_values import check_bounds
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.remote import local_file, suffix_of
from relvit.app.utils.shown_text import one_line
from relvit.models import TransferReport, Weights, transfer_weights
from relvit.utils.messages import did_you_mean, listing

ALLOWED = (
    "a checkpoint of relvit fit, a file or folder of weights, the address of a file such as https://..., or a model of "
    "timm such as 'vit_small_patch16_224.augreg_in21k' or 'hf-hub:OWNER/NAME'"
)
# Print a note if the mean or the standard deviation of the data differs from the pretraining's by more than this
# number, in units of the range 0..1. A smaller difference hardly matters.
TOLERANCE = 0.05


class Pretrained:
    """The weights from which a training starts, or of a teacher; a file is fetched and read once, when first needed.

    Only tensors and plain values are read from files, never code. All methods raise the errors listed below.

    Args:
        name: One of

            - a file: a checkpoint of `relvit fit` (.ckpt), of which the averaged weights are used if it has any, or
              plain weights that timm can read (.safetensors, .pth, .pt, .bin ...); or the remote address of a file,
              such as https://...;
            - a folder with config.json and weights, as `timm.models.save_for_hf` writes it; 'local-dir:FOLDER' is the
              same;
            - a model of timm, with or without the tag of its weights, such as 'vit_small_patch16_224.augreg_in21k', or
              'hf-hub:NAME' on the Hugging Face hub. The weights are downloaded once.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The name is none of these, or the weights cannot be fetched or read.
        DownloadError: The file could not be fetched.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def architecture(self) -> Architecture:
        """Return the model of the weights; raise a ValueError for a file of plain weights, which names no model."""
        if self._checkpoint is not None:
            return self._checkpoint.architecture()
        if self._file is not None:
            raise ValueError(
                f"{self._file} does not say which model it is of: beside --pretrained give --model NAME as well; "
                "elsewhere take a checkpoint of relvit fit, a folder of weights or a model of timm"
            )
        if self._config is None:
            return Architecture(self._timm_name)
        return self._config[1]

    @property
    def thresholds(self) -> list[float] | None:
        """The threshold of each class, where the images of the training have several labels each; otherwise None.

        Thresholds are read from a checkpoint or from a folder of `relvit publish`, but not from a model on the hub.
        """
        if self._checkpoint is not None:
            return self._checkpoint.thresholds
        # Read `_config` before config.json itself, because `_config` refuses a file that timm cannot read.
        if self._file is not None or not self._timm_name.startswith(FOLDER) or self._config is None:
            return None
        folder = Path(self._timm_name.removeprefix(FOLDER))
        about = parse_json((folder / "config.json").read_bytes()).get(KEY)
        return about.get("thresholds") if isinstance(about, dict) else None

    def normalisation(self) -> Normalisation:
        """Return mean and standard deviation of the pretraining's images; a file of plain weights has none."""
        if self._checkpoint is not None:
            return self._checkpoint.normalisation()
        if self._file is not None:
            return Normalisation()
        cfg = timm.get_pretrained_cfg(self._timm_name).to_dict() if self._config is None else self._config[0]
        return Normalisation.read(self.name, cfg)

    def weights(self) -> Weights:
        """Read the weights, and the size, normalisation and classes of the images that they were trained on."""
        if self._checkpoint is not None:
            return self._weights_of_checkpoint(self._checkpoint)
        if self._file is None:
            return self._weights_of_timm()
        if suffix_of(self._file) == ".npz":
            raise ValueError(
                f"{self._file} is a JAX archive: give the name of its model in timm, or save it as .pth in Python"
            )
        # PyTorch warns of unusual tensors. Ignore these warnings, because `check_tensors` refuses such tensors.
        with local_file(self._file) as path, warnings.catch_warnings(action="ignore"):
            try:
                if zipfile.is_zipfile(path):
                    check_archive(path)
                state = load_state_dict(str(path))
            except ArchiveError as error:
                raise ValueError(f"{self._file} cannot be read: {error}") from error
            # For broken files, timm and PyTorch raise errors of almost any type, such as TypeError or
            # UnicodeDecodeError, so catch all of them.
            except Exception as error:
                raise ValueError(
                    f"{self._file} cannot be read: it is damaged, holds no weights, or more than tensors and plain "
                    "values: take another file"
                ) from error
        check_tensors(state, self._file)
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{self._file} holds more than weights: save the state dict of the model alone")
        check_finite(state, self._file)
        return Weights(source=self._file, state=state)

    @cached_property
    def _file(self) -> str | None:
        """The path or remote address of a file; None for a folder or a name, which is left to timm."""
        name, path = self.name, Path(self.name.removeprefix(FOLDER)).expanduser()
        if is_exported(name):
            raise ValueError(not_for_exported(name))
        if is_address(name):
            return name
        if name.startswith(HUB):
            return None
        if path.is_file():
            return str(path)
        if path.is_dir():
            if (path / "config.json").is_file():
                return None
            best = path / "checkpoints" / "best.ckpt"
            hint = f"give its checkpoint, {best}" if best.is_file() else "timm saves this file beside the weights"
            raise ValueError(f"{path} holds no config.json: {hint}")
        check_is_file(path)
        if path.suffix in FILES or len(path.parts) > 1:
            of_hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and path.suffix not in FILES
            hub = f"; if it is on the Hugging Face hub, give {HUB}{name}" if of_hub else ""
            raise FileNotFoundError(f"no weights at {name}{nearest_hint(path)}; give {ALLOWED}{hub}")
        architecture, tag = split_model_name_tag(name)
        if name.lower() in ("true", "false", "yes", "no", "none"):
            raise ValueError(f"{name!r} names no weights: give {ALLOWED}, or null for none")
        if not timm.is_model(architecture):
            hint = model_hint(architecture)
            raise ValueError(f"{name!r} is not a file, a folder or a model of timm{hint}; give {ALLOWED}")
        tags = [known for known in timm.list_pretrained() if known.startswith(f"{architecture}.")]
        if not tags:
            raise ValueError(
                f"timm has no pretrained weights for {architecture}: give a checkpoint, a file or folder of weights, "
                "or a model of timm.list_pretrained()"
            )
        if tag and name not in tags:
            raise ValueError(f"there are no weights {name!r}{did_you_mean(name, tags)}; known: {listing(tags)}")
        return None

    @property
    def _timm_name(self) -> str:
        """The name for `timm.create_model`, for weights that are not a file."""
        path = Path(self.name.removeprefix(FOLDER)).expanduser()
        return f"{FOLDER}{path}" if path.is_dir() else self.name

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        return Checkpoint.read(self._file) if self._file is not None and suffix_of(self._file) == ".ckpt" else None

    @cached_property
    def _config(self) -> tuple[dict[str, Any], Architecture, dict[str, Any]] | None:
        """The config.json of a folder or on the hub: the description of the weights, the model, all its arguments."""
        source, _, path = self._timm_name.partition(":")
        if f"{source}:" not in (HUB, FOLDER):
            return None
        try:
            if f"{source}:" == HUB:
                with hub_access():
                    cfg, architecture, arguments = load_model_config_from_hf(path)
            else:
                cfg, architecture, arguments = load_model_config_from_path(path)
            cfg, arguments = dict(cfg or {}), dict(arguments or {})
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the config.json of {self.name} does not say which model it is of ({one_line(error)}): add "
                "'architecture', the name of a model of timm"
            ) from error
        check_bounds([cfg, arguments], f"the config.json of {self.name}")
        described = described_model(architecture, arguments, f"the config.json of {self.name}")
        return cfg, Architecture(*described), arguments

    def _weights_of_checkpoint(self, checkpoint: Checkpoint) -> Weights:
        model = checkpoint.model
        size = model.get("img_size") or checkpoint.images_args.get("img_size")
        return Weights(
            source=checkpoint.path,
            state={name.removeprefix("net."): tensor for name, tensor in checkpoint.weights.items()},
            class_names=model.get("class_names"),
            input_size=(checkpoint.argument("in_chans"), *parse_size(size)) if size else None,
            **checkpoint.normalisation()._asdict(),
        )

    def timm_model(self, pretrained: bool = True, **arguments: Any) -> nn.Module:
        """Let timm build the model of a name or folder, fetch its weights and convert them for the model.

        Args:
            pretrained: Whether the model gets the pretrained weights; otherwise its weights are random.
            arguments: Further arguments of `timm.create_model`, which override the arguments in a folder.
        """
        name = self._timm_name
        described = self._config[2] if self._config else {}
        try:
            with hub_access() if pretrained and not name.startswith(FOLDER) else nullcontext():
                check_model_size(partial(timm.create_model, name, **arguments), described)
                if pretrained and name.startswith(FOLDER):
                    _check_archives(Path(name.removeprefix(FOLDER)))
                return timm.create_model(name, pretrained=pretrained, **arguments)
        # A config.json may contain anything, and timm and the models raise errors of almost any type for wrong
        # contents, so catch all of them.
        except Exception as error:
            raise ValueError(f"the weights of {name} could not be loaded: {one_line(error)}") from error

    def _weights_of_timm(self) -> Weights:
        """Read the weights of a model that timm itself builds."""
        donor = self.timm_model()
        check_finite(donor.state_dict(), self.name)
        cfg = donor.pretrained_cfg
        try:
            names, size = (tuple(cfg.get(name) or ()) for name in ("label_names", "input_size"))
        except TypeError as error:
            raise ValueError(f"{self.name}: label_names and input_size must be lists ({error})") from error
        if size and not (len(size) == 3 and all(isinstance(number, int) and number > 0 for number in size)):
            raise ValueError(
                f"{self.name} has input_size {list(size)}; allowed are three positive integers: channels, height and "
                "width"
            )
        # Prefer the argument `img_size`, the image size of the absolute embedding. `input_size` may be another size:
        # timm writes the size of the images to `input_size` only for models that take one size, and a retrofitted model
        # takes every size.
        if size and self._config and (built := self._config[2].get("img_size")):
            size = (size[0], *parse_size(built))
        return Weights(
            source=self._timm_name,
            state=donor.state_dict(),
            class_names=list(names) or None,
            input_size=size or None,
            **Normalisation.read(self.name, cfg)._asdict(),
        )


def _check_archives(folder: Path) -> None:
    """Check the archives of PyTorch from which timm may read the weights of a folder, see `check_archive`."""
    # If this file exists, timm reads no other file.
    if not (folder / "model.safetensors").exists():
        for file in folder.iterdir():
            if file.name.endswith((".pth", ".pth.tar", ".bin")) and zipfile.is_zipfile(file):
                check_archive(file)


def architecture_to_build(
    model: str | None,
    model_kwargs: dict[str, Any] | None,
    retrofit: dict[str, Any] | None,
    pretrained: Pretrained | None,
) -> Architecture:
    """Choose the model to build: `model`, or, if it is None, the model of `pretrained`, with the arguments given."""
    if "pretrained" in (model_kwargs or {}):
        raise ValueError("model_kwargs must not hold 'pretrained': it is an option of its own, --model.pretrained")
    if model is not None or pretrained is None:
        return Architecture(model or "relvit_small", model_kwargs, retrofit)
    source = pretrained.architecture()
    kwargs = {**(source.model_kwargs or {}), **(model_kwargs or {})}
    return Architecture(source.model, kwargs or None, source.retrofit if retrofit is None else retrofit)


# An evaluation is in inference mode, and weights that are made in this mode cannot be trained later.
@torch.inference_mode(False)
def load_pretrained(net: nn.Module, pretrained: Pretrained, hparams: Mapping[str, Any], data: Any) -> TransferReport:
    """Load pretrained weights into a network, and print a report and whether the data's normalisation fits.

    `hparams` are the arguments of the `ImageClassifier`.
    """
    weights = pretrained.weights()
    report = transfer_weights(net, weights, known_names(hparams["class_names"], data))
    rank_zero_print(f"pretrained: {report}")
    for note in (size_note(weights, data), normalisation_note(weights, data, hparams["in_chans"])):
        if note:
            rank_zero_print(note)
    return report


def size_note(weights: Weights, data: Any) -> str | None:
    """Return a note where the images have another size than those of the pretraining had, or None."""
    theirs, ours = (weights.input_size or ())[1:], attribute_of(data, "img_size")
    if not theirs or ours is None or (ours := parse_size(ours)) == tuple(theirs):
        return None
    given = theirs[0] if theirs[0] == theirs[1] else f"'[{theirs[0]},{theirs[1]}]'"
    return f"Note: the images have {ours[0]} x {ours[1]} px, those of the pretrained weights had --img_size {given}"


def normalisation_note(weights: Weights, data: Any, channels: int) -> str | None:
    """Return a note where the data are normalised in another way than the images of the pretraining were, or None."""
    ours, options = [], []
    for name, values in normalisation_of(data, channels)._asdict().items():
        theirs, given = getattr(weights, name) or (), values or ()
        if len(theirs) == len(given) and any(abs(a - b) > TOLERANCE for a, b in zip(theirs, given, strict=True)):
            known, used = (f"[{','.join(f'{value:g}' for value in values)}]" for values in (theirs, given))
            ours.append(f"{name} {used}")
            options.append(f"--data.{name} '{known}'")
    if not options:
        return None
    return (
        f"Note: the images are normalised by {' and '.join(ours)}, those of the pretrained weights were by "
        f"{' '.join(options)}"
    )
