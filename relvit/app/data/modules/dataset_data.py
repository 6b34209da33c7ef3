"""DatasetData: any `torch.utils.data.Dataset` of images and labels as a data module."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.transforms import v2

from relvit.app.data.class_labels import Label, label_of, label_text, name_text, rarest
from relvit.app.data.images.given_images import ImageInput, to_pil
from relvit.app.data.images.manifest import ListedImage
from relvit.app.data.loading.user_dataset import check_dataset
from relvit.app.data.modules.base import ImageData, Split
from relvit.app.data.split import stratified_split, warn_of_unused_split
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.number_types import OpenShare, check_ranges
from relvit.utils.messages import an


class DatasetData(ImageData):
    """Datasets in Python: any objects with `__len__` and `__getitem__`, which yield pairs of an image and its label.

    An image has a form that :meth:`relvit.app.evaluation.Predictor.predict` takes: a path, a PIL image, an array
    (H, W, 3) or (H, W), a tensor (3, H, W) or (1, H, W), uint8 or floating point in 0..1. Images may have any size;
    this class augments and normalises them. A label is the index of the class in `class_names`, or, with `multi_label`,
    a tensor bool (num_classes,). If a dataset has the attribute `targets` (its labels in order, as in torchvision), or
    is a `Subset` or `ConcatDataset` of such datasets, the labels are known without loading images. `balance` needs
    known labels, and a resumed training checks that known labels are still the same.

    A checkpoint stores all arguments except the datasets. `relvit predict` and `relvit.load` do not need the datasets.
    All other commands do: write a subclass whose constructor makes the datasets, and pass `--data module.Class`.

    Args:
        train: The dataset to train on.
        val: The dataset to validate on; None: a part of train is held out.
        test: The dataset to test on.
        predict: The dataset to predict, of images, or of pairs of an image and its name; None: test, or val if there is
            no test. Images without names are called 'test/00000' and so on.
        class_names: Name of each class; the label of a class is its index in this list. None takes `train.classes`, if
            train has no `target_transform`.
        in_chans: Channels of the images for the model: 3, or 1 for grey.
        multi_label: Whether images have any number of labels.
        val_fraction: Share of train that is held out if there is no val, in (0, 1): a share of each class if the
            labels are known.
        split_seed: Another seed holds out other images. The seed of the training does not matter here.
        options: See :class:`relvit.app.data.ImageData`.

    Raises:
        ValueError: An argument is out of its range, there are no class names, or a dataset is empty or has another
            number of `targets` than of items, or `targets` that are not classes, or `classes` in another order than
            `class_names`; or, when an image is loaded, its label is not a class or not the one in `targets`, or the
            image cannot be converted.
        TypeError: An argument is unknown, or a dataset is an `IterableDataset` or has no length; or an item of a
            dataset is not a pair of image and label, which shows when it is loaded.
    """

    # `--data` does not offer this class, because the command line cannot pass dataset objects.
    chosen_by_name: ClassVar[bool] = False

    def __init__(
        self,
        train: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        predict: Dataset[Any] | None = None,
        class_names: Sequence[str] | None = None,
        in_chans: int = 3,
        multi_label: bool = False,
        val_fraction: OpenShare = 0.1,
        split_seed: int = 0,
        **options: Any,
    ) -> None:
        check_ranges(DatasetData.__init__, locals())
        self.check_options(options)
        for name, given in {"train": train, "val": val, "test": test, "predict": predict}.items():
            if given is not None:
                check_dataset(given, name)
        if in_chans not in (1, 3):
            raise ValueError(f"in_chans is {in_chans}; images are given to the model with 3 channels, or 1 (grey)")
        if class_names is None and attribute_of(train, "target_transform") is not None:
            raise ValueError(
                f"{type(train).__name__} has a target_transform, which changes the classes: give class_names, the name "
                "of each class after it"
            )
        if class_names is None and (class_names := attribute_of(train, "classes")) is None:
            raise ValueError("no class_names; give the name of each class, such as ['cat', 'dog'], label 0 first")
        self.train: Dataset[Any] | None = train
        self.val: Dataset[Any] | None = val
        self.test: Dataset[Any] | None = test
        self.predict: Dataset[Any] | None = predict
        self.multi_label: bool = multi_label
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        super().__init__(class_names, in_chans, **options)
        self._check_order()
        if self.balance != "none" and (multi_label or (train is not None and targets_of(train) is None)):
            raise ValueError(
                f"balance {self.balance!r} needs one label for each image, and a dataset with `targets`, its labels in "
                "order: add that attribute, or leave balance out"
            )

    def _check_order(self) -> None:
        """Refuse `classes` of a dataset in which a class has another label than in `class_names` or in train.

        An `ImageFolder` numbers the classes that it finds, so if a class has no images in val, all later labels are
        too small there.
        """
        splits = ("train", "val", "test")
        orders = [(split, numbered(names)) for split in splits for names in classes_of_items(getattr(self, split))]
        first = next((own for split, own in orders if split == "train"), {})
        for where, known in {"class_names": numbered(self.class_names), "`classes` of train": first}.items():
            for split, own in orders:
                for name, label in own.items():
                    if known.get(name, label) != label:
                        raise ValueError(
                            f"{name!r} has the label {label} in `classes` of {split}, and {known[name]} in {where}: "
                            "give the same classes the same labels everywhere (ImageFolderData does so for class "
                            "folders), or correct class_names or `classes`"
                        )

    def missing(self, split: Split) -> str | None:
        """Explain which dataset is missing or empty, or return None."""
        source = self._named() if split == "predict" else split
        if source == "val" and self.val is None:
            source = "train"
        if source is None:
            return "no dataset to predict; give one (predict=...), or test or val"
        if getattr(self, source) is None:
            return f"no {split} dataset; give one ({split}=...)"
        return None if len(getattr(self, source)) else f"the {source} dataset is empty: check where it looks for images"

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        if self.val is not None:
            warn_of_unused_split(self)
        if self.test is not None and (reason := self.missing("test")):
            # Refuse an empty test before the training, because without images the test after it would be left out.
            raise ValueError(reason)

    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of one split."""
        if split == "predict":
            named = self._named()
            return NamedImages(getattr(self, named), self.in_chans, self.eval_transform, named)
        return LabelledImages(
            self._source(split), self.in_chans, self.transform_of(split), self.num_classes, self.multi_label
        )

    def held_out(self) -> list[tuple[str, Label]]:
        """Numbers and labels of the images of train that were held out for validation; () is an unknown label."""
        if self.train is None or self.val is not None:
            return []
        aside = self._divided[1]
        labels = targets_of(aside) or [()] * len(aside)
        return [(f"{index:05d}", label_of(label)) for index, label in zip(aside.indices, labels, strict=True)]

    def manifest(self, split: Split) -> Iterator[ListedImage]:
        """List the images of a split by their numbers in the user's dataset, with their labels where these are known.

        The number of an image in a subset would not show that a resumed training holds out other images.
        """
        source = self._source(split)
        targets = targets_of(source)
        for index in range(len(source)):
            label = "" if targets is None else label_text(label_of(targets[index]), self.class_names)
            yield ListedImage(f"{whole_of(source, index)[1]:05d}", "", label)

    def _named(self) -> Split | None:
        """Return the split whose images are predicted."""
        return next((split for split in ("predict", "test", "val") if getattr(self, split) is not None), None)

    def _source(self, split: Split) -> Dataset[Any]:
        if self.val is None and split in ("train", "val"):
            return self._divided[split == "val"]
        return getattr(self, split)

    @cached_property
    def _divided(self) -> tuple[Subset[Any], Subset[Any]]:
        """The images to train on, and those held out for validation where there is no val."""
        targets, count = targets_of(self.train), len(self.train)
        labels = [0] * count if targets is None else rarest([label_of(target) for target in targets])
        names = [f"{index:05d}" for index in range(count)]
        larger, smaller = stratified_split(names, labels, self.val_fraction, self.split_seed, "train")
        return Subset(self.train, larger), Subset(self.train, smaller)


class SourceImages(Dataset[Any]):
    """Images of a user's dataset, transformed.

    Args:
        source: The user's dataset, see `DatasetData`.
        in_chans: Number of channels: 3, or 1 for grey.
        transform: The transform from a PIL image to a tensor.
    """

    def __init__(self, source: Dataset[Any], in_chans: int, transform: v2.Compose) -> None:
        self.source = source
        self.mode = "L" if in_chans == 1 else "RGB"
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def place(self, index: int) -> str:
        """Name an item of the user's dataset, for messages."""
        dataset, index = whole_of(self.source, index)
        return f"item {index} of {type(dataset).__name__}"

    def item(self, index: int) -> Any:
        """Return an item of the user's dataset; an error names its number."""
        try:
            return self.source[index]
        except StopIteration as error:
            # A loader would take this error for the end of the images, and silently leave out the rest of them.
            raise RuntimeError(f"{self.place(index)} raises StopIteration: correct its __getitem__") from error
        except Exception as error:
            error.add_note(f"while loading {self.place(index)}")
            raise

    def image(self, index: int, image: ImageInput) -> Any:
        """Transform an image; an error names its number."""
        try:
            return self.transform(to_pil(image).convert(self.mode))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.place(index)}: {error}") from error


class LabelledImages(SourceImages):
    """Items are ``(image, label)``. A label is an int, or bool (num_classes,) for multi-label images.

    Attributes:
        targets: Label of each item, if the user's dataset has `targets`.
    """

    def __init__(
        self, source: Dataset[Any], in_chans: int, transform: v2.Compose, num_classes: int, multi_label: bool
    ) -> None:
        super().__init__(source, in_chans, transform)
        self.num_classes = num_classes
        self.multi_label = multi_label
        if (targets := targets_of(source)) is not None:
            self.targets: list[int | np.ndarray] = targets
            # A class that does not exist would end the listing of the images with an unclear error, so refuse it here.
            known = np.asarray(targets)
            for index in np.flatnonzero((known < 0) | (known >= num_classes))[:1] if known.ndim == 1 else ():
                self._label(int(index), targets[index])

    def __getitem__(self, index: int) -> tuple[Tensor, int | np.ndarray]:
        item = self.item(index)
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(f"{self.place(index)} is {type(item).__name__}; give a pair (image, label)")
        label = self._label(index, item[1])
        if hasattr(self, "targets") and not np.array_equal(label, self.targets[index]):
            raise ValueError(
                f"{self.place(index)} has the label {label}, but `targets` says {self.targets[index]}: correct "
                "`targets`, the labels of the items in order, or leave the attribute out"
            )
        return self.image(index, item[0]), label

    def _label(self, index: int, given: Any) -> int | np.ndarray:
        label = np.asarray(given)
        if self.multi_label and label.shape == (self.num_classes,) and np.isin(label, (0, 1)).all():
            return label.astype(bool)
        if not self.multi_label and label.shape == () and label.dtype.kind in "iu" and 0 <= label < self.num_classes:
            return int(label)
        allowed = f"a whole number from 0 to {self.num_classes - 1}; with multi_label=True, 0 or 1 for each class"
        if self.multi_label:
            allowed = f"0 or 1 for each of the {self.num_classes} classes"
        raise ValueError(f"{self.place(index)} has the label {given!r}; allowed is {allowed}")


class NamedImages(SourceImages):
    """Items are ``(image, name)``; labels of the source are left out."""

    def __init__(self, source: Dataset[Any], in_chans: int, transform: v2.Compose, split: str) -> None:
        super().__init__(source, in_chans, transform)
        self.split = split

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        item = self.item(index)
        if not isinstance(item, tuple | list):
            item = item, None
        if len(item) != 2:
            found = f"{self.place(index)} is {an(type(item).__name__)} of {len(item)}"
            raise TypeError(f"{found}; give an image, or a pair (image, name)")
        image, name = item
        named = isinstance(name, str | os.PathLike)
        return self.image(index, image), os.fspath(name) if named else f"{self.split}/{index:05d}"


def whole_of(dataset: Dataset[Any], index: int) -> tuple[Dataset[Any], int]:
    """Return the dataset that a subset is taken from, and the number of an item of the subset in that dataset."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return dataset, index


def classes_of_items(dataset: Dataset[Any] | None) -> Iterator[list[str]]:
    """Yield the classes of a dataset in the order of its labels, or those of each part of a `ConcatDataset`.

    Nothing is yielded for a dataset, or a part, that has no `classes`, or changes its labels.
    """
    names = attribute_of(dataset, "classes")
    if names is None and isinstance(dataset, Subset | ConcatDataset):
        for part in [dataset.dataset] if isinstance(dataset, Subset) else dataset.datasets:
            yield from classes_of_items(part)
    elif isinstance(names, list | tuple) and attribute_of(dataset, "target_transform") is None:
        yield [name_text(name) for name in names]


def numbered(names: Sequence[str]) -> dict[str, int]:
    """Return the label of each class, without classes that share a name."""
    counts = Counter(names)
    return {name: label for label, name in enumerate(names) if counts[name] == 1}


def targets_of(dataset: Dataset[Any]) -> list[int | np.ndarray] | None:
    """Return the labels of a dataset with `targets`, or of a `Subset` or `ConcatDataset` of such; None for others.

    Raises:
        ValueError: The dataset has another number of `targets` than of items, or `targets` are not class numbers, or
            0 and 1 for each class.
    """
    targets = attribute_of(dataset, "targets")
    if targets is None and isinstance(dataset, Subset):
        targets = targets_of(dataset.dataset)
        return None if targets is None else [targets[index] for index in dataset.indices]
    if targets is None and isinstance(dataset, ConcatDataset):
        parts = [targets_of(part) for part in dataset.datasets]
        return None if None in parts else [*chain.from_iterable(parts)]
    if targets is None:
        return None
    # Datasets of torchvision apply this function to the labels of items, but not to `targets`.
    if (transform := attribute_of(dataset, "target_transform")) is not None:
        listed = targets.tolist() if isinstance(targets, Tensor | np.ndarray) else targets
        targets = [transform(label) for label in listed]
    try:
        values = torch.as_tensor(targets).numpy() if isinstance(targets, Tensor) else np.asarray(targets)
    except ValueError:
        # NumPy raises ValueError for lists of different lengths, such as the names of each image's classes: keep the
        # lists.
        values = np.asarray([*targets, None], dtype=object)[:-1]
    known = values.dtype.kind in "iu" if values.ndim == 1 else values.ndim == 2 and np.isin(values, (0, 1)).all()
    if values.shape[:1] != (len(dataset),) or (values.size and not known):
        raise ValueError(
            f"`targets` of {type(dataset).__name__} must be one label for each of its {len(dataset)} items, in order, "
            "as a whole number, or with multi_label as 0 or 1 for each class, got an array of shape "
            f"{values.shape} and type {values.dtype}: correct them, or leave the attribute out"
        )
    return values.tolist() if values.ndim == 1 else list(values.astype(bool))
