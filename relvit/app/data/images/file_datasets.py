"""Datasets of image files, with labels or names, that raise or skip files that cannot be read."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

from relvit.app.data.class_labels import Label, target_of
from relvit.app.data.images.decode import ImageSource, StoredImage, UnreadableImageError, load_rgb
from relvit.app.data.images.packed_list import PackedList
from relvit.app.data.loading.loader import SignalSafeDataLoader
from relvit.app.utils.files import from_here
from relvit.app.utils.shown_text import counted

OnError = Literal["error", "skip"]


class LabelledFiles(Dataset[Any]):
    """Image files, or stored images, with labels. Items are ``(image, label)``, transformed from RGB.

    Args:
        samples: For each image its path (or the stored image) and its label.
        transform: The transform from a PIL image to a tensor.
        num_classes: Number of classes.

    Attributes:
        targets: Label of each item: int, or bool (num_classes,) of a multi-label image. The list is made when it is
            first used, because for a million images of 20,000 classes it takes 20 GB.
    """

    def __init__(self, samples: Sequence[tuple[ImageSource, Label]], transform: v2.Compose, num_classes: int) -> None:
        shared = (image.shared for image, _ in samples if isinstance(image, StoredImage) and image.shared is not None)
        self.samples: Sequence[tuple[ImageSource, Label]] = PackedList(
            samples, {id(each): each for each in shared}.values()
        )
        self.transform = transform
        self.num_classes = num_classes

    @cached_property
    def targets(self) -> list[int | np.ndarray]:
        """Label of each item."""
        return [target_of(label, self.num_classes) for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int | np.ndarray]:
        image, label = self.samples[index]
        return self.transform(load_rgb(image)), target_of(label, self.num_classes)


class NamedFiles(Dataset[Any]):
    """Image files, or stored images, without labels. Items are ``(image, path)``, transformed from RGB.

    Whatever form the user's paths had, the paths in the items are relative if they are below the current folder,
    otherwise absolute (`from_here`).
    """

    def __init__(self, paths: Sequence[ImageSource], transform: v2.Compose) -> None:
        self.paths: list[ImageSource] = [from_here(path) if isinstance(path, str) else path for path in paths]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        path = self.paths[index]
        return self.transform(load_rgb(path)), str(path)


class Unreadable(NamedTuple):
    """A file that could not be read, and why."""

    path: str
    reason: str


class SkipUnreadable(Dataset[Any]):
    """Wrap a dataset so that items are ``(item, unreadable files)`` instead of an error for a broken file.

    Args:
        dataset: The wrapped dataset, which raises UnreadableImageError if a file cannot be read.
        replace: Whether the next readable item takes the place of a broken one, so that training batches stay full.
            Otherwise the item is None, because no image may count twice in evaluation.
    """

    def __init__(self, dataset: Dataset[Any], replace: bool) -> None:
        self.dataset = dataset
        self.replace = replace

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, list[Unreadable]]:
        failed: list[Unreadable] = []
        for step in range(len(self) if self.replace else 1):
            try:
                return self.dataset[(index + step) % len(self)], failed
            except UnreadableImageError as error:
                failed.append(Unreadable(error.path, error.reason))
        if self.replace:
            path, reason = failed[0]
            raise ValueError(
                f"none of {counted(len(self), 'training image')} can be read; the first tried is {path}: {reason}; "
                "relvit check-data lists the reasons of all"
            )
        return None, failed


class SkipUnreadableBatches(SkipUnreadable):
    """Skip unreadable files of `InMemoryBatches`, for a DataLoader with `identity_collate`."""

    def __getitems__(self, indices: list[int]) -> tuple[Any, list[Unreadable]]:
        """Return a batch of the readable images, or None if there are none, and the list of unreadable files."""
        return collate_readable([self[index] for index in indices], self.dataset.__getitems__)


def collate_readable(
    items: list[tuple[Any, list[Unreadable]]], collate: Callable[[list[Any]], Any] = default_collate
) -> tuple[Any, list[Unreadable]]:
    """Return a batch of the readable items, or None if there are none, and the list of unreadable files."""
    readable = [item for item, _ in items if item is not None]
    return collate(readable) if readable else None, [file for _, failed in items for file in failed]


class SkipUnreadableLoader(SignalSafeDataLoader):
    """DataLoader of a `SkipUnreadable` dataset: yields readable images, and records path and reason of broken files.

    A batch without a readable image is left out. The main process adds path and reason to the dictionary `record`. In a
    training, `record` is a part of `ImageData.unreadable`, which the callback `DataRecord` writes as unreadable.csv.
    """

    def __init__(self, *arguments: Any, record: dict[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.record = record

    def __iter__(self) -> Iterator[Any]:
        for batch, failed in super().__iter__():
            self.record.update(failed)
            if batch is not None:
                yield batch
