"""Predict classes, features and attention of images in Python by a trained classifier (`relvit.load`)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from timm.models import filter_pretrained_cfg
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from relvit.app.data import eval_transform, parse_size
from relvit.app.data.batches import ImageBatch, images_of
from relvit.app.data.images.file_datasets import OnError, SkipUnreadable, SkipUnreadableLoader, collate_readable
from relvit.app.data.images.folders import image_files
from relvit.app.data.images.given_images import ImageInput, InputImages
from relvit.app.data.loading.user_dataset import LoadedDataset
from relvit.app.data.shape import ImageShape
from relvit.app.evaluation.exported import ExportedClassifier
from relvit.app.training import Checkpoint, classifier_of
from relvit.app.training.base_classifier import BaseClassifier, run_batches
from relvit.app.training.labels import Labels
from relvit.app.utils.defaults import torch_defaults, under_torch_defaults
from relvit.app.utils.files import is_exported
from relvit.app.utils.shown_text import counted, visible
from relvit.models import AttentionMaps, Reach, attention_maps
from relvit.utils.messages import check_choice

# Leave out these entries of timm's `pretrained_cfg`, which describe timm's own weights of the architecture, not the
# checkpoint's weights.
FOREIGN = ("tag", "test_input_size", "test_crop_pct", "test_pool_size", "label_offset", "label_descriptions")


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, in order; for a multi-label model, all classes above their thresholds.

    Attributes:
        names: names of the classes.
        probabilities: probability of each of these classes.
        path: the image's file, if it came from one.
    """

    names: list[str]
    probabilities: list[float]
    path: str | None = None

    @property
    def name(self) -> str:
        """The most probable class; an IndexError where a multi-label model finds none."""
        return self.names[0]

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.probabilities[0]


class Predictor:
    """The classifier and transforms of a checkpoint (with averaged weights, if there are any) or of an exported file.

    `relvit.load` makes a predictor.

    Args:
        ckpt_path: the checkpoint, or an .onnx or .pt2 of `relvit export`, which can only predict.
        img_size: size of the images given to the model, one number or (height, width); None: as in training. If the
            training used native shapes, images keep their shapes, with at most as many patches as this size has.
        reach: how the model treats images of another size than in training, see `relvit.models.set_reach`.

    Attributes:
        checkpoint: the checkpoint's description of the training, without weights.
        model: the timm model, in evaluation mode; no parameter requires a gradient. `model.pretrained_cfg` describes
            the images of the training and the classes, for `timm.data.resolve_model_data_config` and
            `timm.models.save_for_hf`.
        class_names: name of each class; the label of a class is its index in this list.
        thresholds: for a multi-label model, for each class the lowest probability at which an image has the class; None
            for all other models.
        img_size: (height, width).
        reach: the argument of the same name.
        mean, std: statistics of each channel, in units of the range 0..1.
        crop_pct: proportion of each side that the centre crop keeps.
        shape: the size of all images, or the patch size and the largest number of patches, see
            `relvit.app.data.shape.ImageShape`.
        transform: function from a PIL image to the model's input.

    Raises:
        FileNotFoundError, ValueError: the file is missing or not a checkpoint of `relvit fit`, a part of the checkpoint
            is missing, or the model does not take the size or the reach.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float

    @torch_defaults()
    def __init__(
        self, ckpt_path: str | os.PathLike[str], img_size: int | Sequence[int] | None = None, reach: Reach = "trained"
    ) -> None:
        checkpoint, classifier = _read_classifier(ckpt_path)
        self.classifier: BaseClassifier = classifier.requires_grad_(False)
        self.checkpoint: Checkpoint = replace(checkpoint, weights={})
        trained_size, self.mean, self.std, self.crop_pct = checkpoint.transforms()
        self.class_names: list[str] = checkpoint.class_names()
        if len(self.class_names) != self.classifier.hparams.num_classes:
            raise ValueError(
                f"{ckpt_path} has {len(self.class_names)} class names but {self.classifier.hparams.num_classes} model "
                "outputs: take another checkpoint"
            )
        if note := checkpoint.assumed_transforms():
            warnings.warn(f"{note}. If yours differ, set `transform`", stacklevel=3)
        self.reach = reach
        self.classifier.set_reach(reach, checkpoint)
        self._set_size(img_size)
        if self.classifier.net is not None:
            # Some functions of timm read `pretrained_cfg`, others `default_cfg`, so set both.
            self.model.pretrained_cfg = self.model.default_cfg = self._timm_cfg(trained_size)

    @property
    def model(self) -> nn.Module:
        """The timm model, with the averaged weights where the training kept an average; an exported file has none."""
        return self.classifier.evaluated

    @property
    def num_features(self) -> int:
        """The length of the feature vectors."""
        # In some models of timm the pooling, or a layer before the last one, changes the length `num_features`, so
        # prefer `head_hidden_size`, which models that are not of timm may lack.
        return getattr(self.model, "head_hidden_size", self.model.num_features)

    @property
    def thresholds(self) -> list[float] | None:
        """The thresholds of the classes of a multi-label model."""
        return self.labels.thresholds

    @property
    def labels(self) -> Labels:
        """Whether images have one label or several."""
        return self.classifier.labels

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.classifier.device

    def to(self, device: str | torch.device) -> Predictor:
        """Move the model to a device and return the predictor."""
        self.classifier.to(device)
        return self

    @torch_defaults()
    def at_size(self, img_size: int | Sequence[int] | None) -> Predictor:
        """Return a predictor of the same model, which both share, for images of another size; see `Predictor`.

        The new predictor has the transform of the training. If you have set another `transform`, the new predictor
        keeps it only at the same size; at another size a warning says that it does not.
        """
        other = copy(self)
        other._set_size(img_size)
        if self.transform is not self._made_transform:
            if other.shape == self.shape:
                other.transform = self.transform
            else:
                text = "the predictor of another size has the transform of the training again: set its `transform`, too"
                warnings.warn(f"`transform` was set, but {text}", stacklevel=3)
        return other

    def _set_size(self, img_size: int | Sequence[int] | None) -> None:
        self.shape: ImageShape = self.checkpoint.shape()
        if img_size is not None:
            self.shape = self.shape.at_size(parse_size(img_size))
            if self.shape.fixed:
                self.classifier.check_size(self.shape.img_size)
        self.img_size: tuple[int, int] = self.shape.img_size
        transform = eval_transform(self.img_size, self.mean, self.std, self.crop_pct)
        self.transform: v2.Compose = self.shape.adapt(transform)
        self._made_transform = self.transform

    @torch_defaults()
    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
        mirror: bool = False,
        on_error: OnError = "error",
    ) -> Any:  # Overloads cannot tell a path of an image (a Prediction) from a path of a folder (a list).
        """Predict the most probable classes, or, with a multi-label model, all classes that reach their thresholds.

        Args:
            images: one image, or several: a list or other iterable (such as a pandas Series of paths), a folder (all
                its images in the order of their paths), or an array or tensor with one more dimension. An image is a
                path, a PIL image, an array (H, W, 3) or (H, W), or a tensor (3, H, W) or (1, H, W), uint8 or floating
                point in 0..1. Each image is resized, cropped and normalised as for validation in the training.
            top: number of classes to return; the model's number of classes is the limit. None: five; for a multi-label
                model all classes that reach their thresholds.
            batch_size: images per batch.
            num_workers: processes that read images; 0: this process reads them.
            mirror: whether to average the probabilities of each image and its mirror image.
            on_error: what to do about an image that cannot be read: 'error' stops and names the image; 'skip' goes on
                without the image, and warns at the end, with the number of unreadable images and the first of them.

        Returns:
            A `Prediction` for one image, a list of `Prediction`s for several images. With 'skip', the list has None for
            an unreadable image, so that it is as long as the given list; for a folder, whose predictions have paths,
            unreadable images are left out.

        Raises:
            UnreadableImageError: a ValueError: an image cannot be read, and `on_error` is 'error'.
            TypeError, ValueError: `images` holds something that is not an image, or is a folder without images.
        """
        if top is not None and top < 1:
            raise ValueError(f"top is {top}; give the number of classes, 1 or more")
        items, form = _several(images)
        found: list[Prediction | None] = []
        probabilities = partial(self.probabilities, mirror=mirror)
        predicted = partial(self.labels.predicted, names=self.class_names, top=top)
        rows = self._map(probabilities, predicted, items, batch_size, num_workers, on_error)
        for item, row in zip(items, rows, strict=True):
            path = os.fspath(item) if isinstance(item, str | os.PathLike) else None
            if row is not None:
                row = Prediction([name for name, _ in row], [probability for _, probability in row], path)
            found.append(row)
        if form == "folder":
            return [prediction for prediction in found if prediction is not None]
        return found[0] if form == "one" else found

    @torch_defaults()
    def embed(
        self,
        images: ImageInput | Iterable[ImageInput],
        batch_size: int = 32,
        num_workers: int = 0,
        on_error: OnError = "error",
    ) -> Tensor:
        """Compute the features before the classifier, float32 (N, num_features) on the CPU; N = 1 for one image.

        For arguments and errors see `predict`. With 'skip' the row of an unreadable image is NaN, even if `images` is a
        folder, because rows have no paths. `relvit.app.evaluation.embed_folder` also returns paths.
        """
        items, _ = _several(images)
        found = torch.full((len(items), self.num_features), torch.nan)
        for index, row in enumerate(self._map(self.features, list, items, batch_size, num_workers, on_error)):
            if row is not None:
                found[index] = row
        return found

    @torch_defaults()
    def attention(self, image: ImageInput, layers: Sequence[int] | None = None) -> AttentionMaps:
        """Compute the attention weights for one image, at `img_size`.

        Args:
            image: one image, see `predict`.
            layers: indices of the blocks; negative ones count from the last block; None: all blocks.

        Returns:
            See `relvit.models.AttentionMaps`: weights of each layer, float32 (heads, N, N) on the CPU; rows and columns
            of patches; number of tokens before the patches.

        Raises:
            UnreadableImageError, ValueError: the image cannot be read, or no block has one of the numbers in `layers`.
            TypeError: `image` is not an image, or holds several images; or the model has no attention.
        """
        items, form = _several(image)
        if form != "one":
            raise TypeError(f"attention takes one image, got {len(items)} of them: give one after the other")
        pixels, _ = next(self.batches(items))
        maps = attention_maps(self.model, torch.stack(images_of(pixels)).to(self.device), layers)
        return maps._replace(weights=[weights[0].cpu() for weights in maps.weights])

    @torch_defaults()
    @torch.no_grad()
    def probabilities(self, pixels: ImageBatch, mirror: bool = False) -> Tensor:
        """Compute probabilities float32 (B, classes), on the CPU, of a batch of `batches`."""
        return self.classifier.probabilities(pixels, mirror).cpu()

    @torch_defaults()
    @torch.no_grad()
    def features(self, pixels: ImageBatch) -> Tensor:
        """Compute the pooled features before the classifier, float32 (B, num_features), of a batch of `batches`."""
        return self.classifier.features(pixels).cpu()

    def check_channels(self) -> None:
        """Refuse to read images for a model of other channels than 1 or 3, which only takes tensors."""
        if len(self.mean) not in (1, 3):
            raise ValueError(
                f"the model takes images of {len(self.mean)} channels; only 1 or 3 can be read: give batches of "
                "tensors, normalised as in the training, to `probabilities` or `features`"
            )

    def batches(
        self,
        items: Sequence[ImageInput],
        batch_size: int = 32,
        num_workers: int = 0,
        unreadable: dict[str, str] | None = None,
    ) -> Iterator[tuple[ImageBatch, Tensor]]:
        """Yield transformed images, float32 (B, C, H, W) or a native batch, and their indices in `items`, int64 (B,).

        Args:
            items: images, see `predict`.
            batch_size: images per batch.
            num_workers: processes that read images.
            unreadable: a dictionary to which path and reason of each unreadable file are added; the file is then left
                out. None: an unreadable file raises an error.
        """
        self.check_channels()
        dataset = LoadedDataset(InputImages(items, len(self.mean), self.transform))
        # A DataLoader draws a seed for its workers. Without a generator of its own it would draw from PyTorch's global
        # generator, so that a prediction would change the random numbers of the user's training.
        options: dict[str, Any] = {"num_workers": num_workers, "generator": torch.Generator("cpu")}
        if unreadable is None:
            return under_torch_defaults(DataLoader(dataset, batch_size, collate_fn=self.shape.collate, **options))
        options |= {"collate_fn": partial(collate_readable, collate=self.shape.collate), "record": unreadable}
        return under_torch_defaults(SkipUnreadableLoader(SkipUnreadable(dataset, replace=False), batch_size, **options))

    def _map(
        self,
        compute: Callable[[ImageBatch], Tensor],
        rows_of: Callable[[Tensor], Sequence[Any]],
        items: Sequence[ImageInput],
        batch_size: int,
        num_workers: int,
        on_error: OnError,
    ) -> list[Any]:
        """Return `rows_of(compute(batch))` for each image; with 'skip' None for an image that cannot be read."""
        check_choice("on_error", on_error, get_args(OnError))
        unreadable: dict[str, str] | None = None if on_error == "error" else {}
        rows: list[Any] = [None] * len(items)
        for found, indices in run_batches(compute, self.batches(items, batch_size, num_workers, unreadable)):
            for index, row in zip(indices.tolist(), rows_of(found), strict=True):
                rows[index] = row
        if unreadable:
            path, reason = next(iter(unreadable.items()))
            count = sum(row is None for row in rows)
            text = f"{count} of {counted(len(items), 'image')} could not be read; the first: {visible(path)}: {reason}"
            # With this `stacklevel` the warning names the line of the user's code that called `predict` or `embed`,
            # which have a decorator.
            warnings.warn(text, stacklevel=4)
        return rows

    def _timm_cfg(self, trained_size: tuple[int, int]) -> dict[str, Any]:
        """Describe the trained model as timm does in `model.pretrained_cfg`: images of the training and classes."""
        of_architecture = filter_pretrained_cfg(self.model.pretrained_cfg, remove_source=True)
        return {
            **{name: value for name, value in of_architecture.items() if name not in FOREIGN},
            "num_classes": len(self.class_names),
            "label_names": tuple(self.class_names),
            "input_size": (len(self.mean), *trained_size),
            "pool_size": None,
            "mean": self.mean,
            "std": self.std,
            "crop_pct": self.crop_pct,
            "crop_mode": "center",
            "interpolation": "bicubic",
            "custom_load": False,
        }

    def __repr__(self) -> str:
        about = self.classifier.hparams.model, counted(len(self.class_names), "class"), self.shape.words()
        return f"Predictor({', '.join(about)}, on {self.device})"


def check_predictor(given: object) -> None:
    """Raise TypeError for a model or a path in place of a `Predictor`."""
    if not isinstance(given, Predictor):
        raise TypeError(f"predictor must be a Predictor, which relvit.load returns, got {type(given).__name__}")


def _read_classifier(path: str | os.PathLike[str]) -> tuple[Checkpoint, BaseClassifier]:
    if is_exported(path):
        exported = ExportedClassifier(path)
        return exported.checkpoint, exported
    checkpoint = Checkpoint.read(path)
    return checkpoint, classifier_of(checkpoint)


def _several(
    images: ImageInput | Iterable[ImageInput],
) -> tuple[Sequence[ImageInput], Literal["one", "several", "folder"]]:
    """Return the list of images, and the form in which they were given."""
    if isinstance(images, str | os.PathLike) and Path(images).is_dir():
        paths = image_files(os.fspath(images))
        if not paths:
            raise ValueError(f"no image below {os.fspath(images)}: give a folder with images")
        return paths, "folder"
    if isinstance(images, np.ndarray | Tensor):
        several = images.ndim in (1, 4)  # An array with one dimension holds paths.
    else:
        several = isinstance(images, Iterable) and not isinstance(images, str | bytes)
    return (list(images), "several") if several else ([images], "one")
