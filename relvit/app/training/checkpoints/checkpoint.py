"""The `Checkpoint` type: model, weights, classes, data module and progress that a checkpoint file describes.

`file.py` reads and checks the file; `load.py` builds the classifier.
"""

from __future__ import annotations

import inspect
import math
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import timm
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from relvit.app.data import ImageData, ImageFilesData, ImageFolderData, parse_size
from relvit.app.data.recorded_arguments import IMAGES, transforms_of
from relvit.app.data.registry import class_path_of, imported_data_module
from relvit.app.data.shape import ImageShape, shape_of
from relvit.app.training.checkpoints.exact_resume import POINT_KEY, ResumePoint
from relvit.app.training.checkpoints.file import BEST, read_checkpoint
from relvit.app.training.checkpoints.upgrades import KEY
from relvit.app.utils.files import is_exported
from relvit.app.utils.masks import MASK, masked
from relvit.app.utils.shown_text import one_line
from relvit.models import Reach
from relvit.utils.messages import an, listing
from relvit.version import __version__

# The data determine these arguments of `ImageClassifier`.
OF_THE_DATA = ("num_classes", "in_chans", "img_size", "class_names", "multi_label")
# These arguments of `ImageClassifier` determine the network.
NETWORK = ("model", "model_kwargs", "retrofit", *OF_THE_DATA)

# A checkpoint or exported file with one of these data modules does not say where the images of the training are.
UNNAMED = ("", "relvit.app.data.DatasetData")


class Architecture(NamedTuple):
    """The arguments of `ImageClassifier` that choose the model, without arguments for images and classes."""

    model: str
    model_kwargs: dict[str, Any] | None = None
    retrofit: dict[str, Any] | None = None


class Normalisation(NamedTuple):
    """Mean and standard deviation of each channel, in units of the range 0..1; None where they are unknown."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @classmethod
    def read(cls, source: str, values: Mapping[str, Any]) -> Normalisation:
        """Read 'mean' and 'std' from the values of a file; raise a ValueError if they are not numbers."""
        try:
            found = cls(*(tuple(map(float, values.get(name) or ())) or None for name in cls._fields))
            if not all(map(math.isfinite, (*(found.mean or ()), *(found.std or ())))):
                raise ValueError("not finite")
            return found
        except (TypeError, ValueError, OverflowError) as error:
            mean, std = (reprlib.repr(values.get(name)) for name in cls._fields)
            raise ValueError(
                f"{source}: mean and std must be lists of finite numbers, got mean {mean} and std {std}; correct them "
                "in its config.json, or if it is a checkpoint take another one"
            ) from error


class Transforms(NamedTuple):
    """Size, normalisation and crop of images in evaluation, see `relvit.app.data.eval_transform`."""

    img_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of `relvit fit` or `relvit average`, without the state of the optimiser.

    Methods raise a ValueError if the file lacks a part that the method needs.

    Attributes:
        path: The file or remote address, for messages.
        model: The arguments of `ImageClassifier`.
        data: The 'class_path' and 'init_args' of the data module, whose class may not be installed here. 'class_path'
            is '' if the images came neither from a data module of relvit nor from a class that is derived from one.
        images: The classes and the transforms of the training's images, except those that 'init_args' already contains.
        fit: Other options of the training, see `ImageClassifier.fit_options`.
        versions: The versions of the packages that wrote the checkpoint.
        weights: The tensors of the classifier; the averaged weights if the training kept an average.
        temperature: The number by which logits are divided in evaluation, see `relvit.app.evaluation.calibrate`.
        thresholds: The threshold of each class, see `relvit.app.training.SeveralLabels`. None: the file has no
            thresholds.
        resumable: Whether the file has the state of an optimiser, so that the training can be resumed.
        epoch: The epoch in which the checkpoint was written, counted from 0.
        step: The number of optimiser steps before the checkpoint was written.
        resume_point: The `ResumePoint` as stored. None in checkpoints that no training wrote, such as an average.
        average_of: For each checkpoint of which `relvit average` made this one, its path and its `sources`.
    """

    path: str
    model: dict[str, Any]
    data: dict[str, Any]
    fit: dict[str, Any]
    versions: dict[str, str]
    weights: dict[str, Tensor] = field(repr=False)
    temperature: float = 1.0
    thresholds: list[float] | None = None
    images: dict[str, Any] = field(default_factory=dict)
    resumable: bool = False
    epoch: Any = None
    step: Any = None
    resume_point: Any = None
    average_of: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str], file: Path | None = None) -> Checkpoint:
        """Read a checkpoint; for arguments and errors see `read_checkpoint`."""
        # Results of the run are looked up beside the checkpoint, so replace the folder of a run by its best checkpoint.
        best = Path(path) / BEST
        path = best if best.is_file() else path
        content = read_checkpoint(path, file)
        description = content[KEY]
        return cls(
            path=os.fspath(path),
            model=description["model"],
            data=description["data"],
            fit=description.get("fit") or {},
            versions=description.get("versions") or {},
            weights=content["state_dict"],
            temperature=description.get("temperature", 1.0),
            thresholds=description.get("thresholds"),
            images=description.get("images") or {},
            resumable="optimizer_states" in content,
            epoch=content.get("epoch"),
            step=content.get("global_step"),
            resume_point=content.get(POINT_KEY),
            average_of=description.get("average_of") or {},
        )

    def argument(self, name: str) -> Any:
        """Return an argument of the `ImageClassifier`."""
        if name not in self.model:
            raise ValueError(f"{self.path} lacks {name!r}, which relvit fit writes: take another checkpoint")
        return self.model[name]

    def architecture(self) -> Architecture:
        """Return the arguments that choose the model, which can be built for other classes and another image size."""
        return Architecture(self.argument("model"), self.model.get("model_kwargs"), self.model.get("retrofit"))

    @property
    def sources(self) -> list[str]:
        """The names of the weights from which the training, or each training of an average, started."""
        own = self.model.get("pretrained")
        return sorted({*([own] if own else []), *chain.from_iterable(self.average_of.values())})

    @property
    def data_args(self) -> dict[str, Any]:
        """The arguments of the data module."""
        return self.data["init_args"]

    @property
    def images_args(self) -> dict[str, Any]:
        """The arguments of the data module, with the classes and transforms that its images really have."""
        return self.data_args | self.images

    @property
    def data_type(self) -> type[ImageData] | None:
        """The class of the data module if it is imported already, else None; no file can choose what is imported."""
        return imported_data_module(self.data["class_path"])

    def data_module(self, **changes: Any) -> ImageData:
        """Build the data module of the training with some arguments changed; changes that are None are ignored.

        A checkpoint does not hold secrets. A secret argument gets its default; if it has no default, it must be given
        in `changes`.

        Raises:
            ValueError: The data cannot be built, `check_data` refuses them, or they have one label per image and the
                model is for several, or the reverse.
        """
        data_type = self.data_type
        if data_type is None and (by_root := self.data_of_root(changes.get("root"))) is not None:
            return self.with_data(by_root).data_module(**changes)
        if data_type is None:
            raise ValueError(self.unknown_data())
        changes = {name: value for name, value in changes.items() if value is not None}
        if unknown := changes.keys() - set(data_type.argument_names()):
            raise ValueError(
                f"{self.path} was trained with {data_type.__name__}, which has no {min(unknown)}: leave it out"
            )
        defaults = data_type.argument_defaults()
        optional = {name for name, default in defaults.items() if default is not inspect.Parameter.empty}
        arguments = self.data_args | changes
        arguments = {name: value for name, value in arguments.items() if value != MASK or name not in optional}
        if names := masked(arguments):
            name = data_type.__name__
            options = " ".join(f"--data.{each}" for each in names)
            raise ValueError(
                f"{self.path} was trained with {listing(names)} of {name}; secrets are not saved: give {options} "
                f"(in Python data_module({names[0]}=...)), or let {name} read it from the environment by default"
            )
        try:
            with transforms_of(self.images_args):
                data = data_type(**arguments)
        except TypeError as error:
            raise ValueError(
                f"{an(data_type.__name__)} cannot be built as {self.path} describes it: {error}"
            ) from error
        self.check_data(data)
        several = bool(self.model.get("multi_label"))
        if several != data.multi_label:
            raise ValueError(
                f"{self.path} was trained with {'several labels' if several else 'one label'} per image (multi_label "
                f"{several}), the data have {'several' if data.multi_label else 'one'}: give data with the same "
                "multi_label (for lists of images on the command line: --data.label_separator)"
            )
        return data

    def data_of_root(self, root: str | None) -> type[ImageData] | None:
        """Return `ImageFolderData` if there is a root and the file names no images: root then holds class folders."""
        return ImageFolderData if root is not None and self.data["class_path"] in UNNAMED else None

    def unknown_data(self) -> str:
        """Explain that the data module of the training is not known here, and what to do."""
        name, paths = self.data["class_path"], "relvit predict takes images by their paths, too"
        if name in UNNAMED:
            why = "was trained on datasets in Python, which a checkpoint does not hold"
            if is_exported(self.path):
                why = "is an exported file, which does not say where the images of the training are"
            return f"{self.path} {why}: give class folders by --root DIR, or other images by --data NAME; {paths}"
        return f"{self.path} was trained with the data module {name}: import it, or give --data {name}; {paths}"

    def with_data(self, data_type: type[ImageData] | None = None, **changes: Any) -> Checkpoint:
        """Return the checkpoint for other images with the same transforms and classes.

        Args:
            data_type: The data module of the images. None keeps the data module of the checkpoint. Another data module
                does not get the checkpoint's `root`.
            changes: Arguments that replace arguments of the checkpoint's data module. Arguments that the new data
                module does not have are left out.
        """
        path, known, names = self.data["class_path"], self.data_args, list(self.data_args)
        images = self.images
        if data_type is not None and data_type is not self.data_type:
            path, names = class_path_of(data_type), data_type.names_to_restore()
            if note := self.assumed_transforms():
                given = ", ".join(f"--data.{name}" for name in self.images["assumed"])
                rank_zero_warn(f"{note}; if yours differ, give {given}")
            # Images of another kind lie in another place, so do not hand `root` on.
            known = {name: value for name, value in self.images_args.items() if name != "root"}
            images = images | {name: value for name, value in (known | changes).items() if name in IMAGES}
        arguments = {name: value for name, value in (known | changes).items() if name in names}
        return replace(self, data={"class_path": path, "init_args": arguments}, images=images)

    def assumed_transforms(self) -> str | None:
        """Say which values of the transforms are not known but assumed; None: all are known."""
        if not (assumed := self.images.get("assumed")):
            return None
        values = ", ".join(f"{name} {self.images[name]}" for name in assumed)
        return (
            f"{self.path} was trained with loaders that are not relvit's, which do not say how they transform images: "
            f"{values} are those of timm's description of the model"
        )

    def normalisation(self) -> Normalisation:
        """Return the mean and standard deviation of the training's images."""
        return Normalisation.read(self.path, self.images_args)

    def transforms(self) -> Transforms:
        """Return how images are resized, cropped and normalised in evaluation."""
        with self._reading("the transforms of its images"):
            mean, std = (tuple(map(float, self.images_args[name])) for name in Normalisation._fields)
            return Transforms(parse_size(self.images_args["img_size"]), mean, std, float(self.images_args["crop_pct"]))

    def shape(self) -> ImageShape:
        """Return the shape of the training's images: one size, or patches within a budget."""
        with self._reading("the shape of its images"):
            return shape_of(self.images_args)

    def check_reach(self, reach: Reach) -> None:
        """Raise ValueError for a reach that needs images of one size, if the training's images had native shapes."""
        if reach not in ("trained", "logn", "mirror") and not (shape := self.shape()).fixed:
            raise ValueError(
                f"reach {reach!r} is for images of one size, {self.path} was trained on {shape.words()}: leave reach "
                "out"
            )

    def class_names(self) -> list[str]:
        """Return the names of the classes in order."""
        with self._reading("the names of its classes"):
            return [str(name) for name in self.images_args["class_names"]]

    def point(self) -> ResumePoint | None:
        """Return where the training was; None in checkpoints that `relvit fit` did not write."""
        with self._reading("the progress of its training"):
            return None if self.resume_point is None else ResumePoint(**self.resume_point)

    def finished_epochs(self) -> int:
        """Return the number of complete epochs."""
        point = self.point()
        with self._reading("the progress of its training"):
            return int(self.epoch + 1 if point is None else point.epoch)

    def finished_steps(self) -> int:
        """Return the number of optimiser steps."""
        with self._reading("the progress of its training"):
            return int(self.step)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn errors into a ValueError that names the part of the file that is missing or has another type."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path}: cannot read {what} ({one_line(error)}): take a checkpoint that relvit fit wrote"
            ) from error

    def check_network(self, asked: Mapping[str, Any], names: Iterable[str] = (*NETWORK, "pretrained")) -> None:
        """Refuse arguments of an `ImageClassifier` that differ, in one of these names, from the checkpoint's."""
        if difference := first_difference(self.model, asked, names):
            name, trained, wanted = difference
            raise ValueError(f"{self.path} was trained with {name} {trained}, not {wanted}: drop that option")

    def check_data(self, data: ImageData) -> None:
        """Refuse a data module with other classes or another number of channels; the image size may differ."""
        if (names := self.argument("class_names")) is not None:
            with self._reading("the names of its classes"):
                trained, found = list(map(str, names)), list(data.class_names)
            if trained != found:
                where = f" in {data.place}" if isinstance(data, ImageFilesData) else ""
                raise ValueError(
                    f"{self.path} was trained on other classes than the data has{where}: "
                    f"{_changed_classes(trained, found)}; give the classes the names that they had in the training, or "
                    f"start another training from these weights with --model.pretrained {self.path}"
                )
        if (channels := self.argument("in_chans")) is not None and channels != data.in_chans:
            raise ValueError(
                f"{self.path} was trained with in_chans {channels}, the data has {data.in_chans}: give data with "
                f"{channels}"
            )


def _changed_classes(trained: Sequence[str], found: Sequence[str]) -> str:
    """Name the classes that only the data have, and the classes that only the training had."""
    before, now = set(trained), set(found)
    new, gone = [name for name in found if name not in before], [name for name in trained if name not in now]
    parts = {f"{listing(new)} {'is' if len(new) == 1 else 'are'} new": new}
    parts |= {f"{listing(gone)} {'is' if len(gone) == 1 else 'are'} missing": gone}
    return " and ".join(text for text, names in parts.items() if names) or "their order is another"


def versions() -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint."""
    modules = {"torch": torch, "timm": timm, "lightning": lightning}
    return {"relvit": __version__} | {name: str(module.__version__) for name, module in modules.items()}


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, str, str] | None:
    """Find the first of these arguments that differs; return its name and both values in short, or None."""
    for name in names:
        ours, theirs = _plain(one.get(name)), _plain(other.get(name))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            differ = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
            ours, theirs = ({key: side.get(key) for key in differ} for side in (ours, theirs))
        # Empty arguments such as {} mean the same as None, except in `retrofit`: {} is a retrofit with the default
        # arguments, and None is not a retrofit.
        if ours != theirs and (ours or theirs or name == "retrofit"):
            return name, *_short(repr(ours), repr(theirs))
    return None


def _short(ours: str, theirs: str, most: int = 80) -> list[str]:
    """Cut two long texts, each to the part in which they differ."""
    same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    start = same - most // 4 if same > most // 2 and max(len(ours), len(theirs)) > most else 0
    shown = (f"...{text[start:]}" if start else text for text in (ours, theirs))
    return [text if len(text) <= most else f"{text[: most - 3]}..." for text in shown]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
