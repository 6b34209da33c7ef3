"""Going on where an image file cannot be read."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from relvit.data.files.images import UnreadableImageError
from relvit.data.loading.loader import SteadyLoader
from relvit.data.loading.memory import WholeBatches


class Unreadable(NamedTuple):
    """A file that could not be read, and why."""

    path: str
    reason: str


class Tolerant(Dataset):
    """A dataset of files whose items are ``(item, what could not be read)``.

    Args:
        dataset: Raises UnreadableImageError where a file cannot be read.
        replace: Whether the next readable item stands in, as batches of training should stay full, or None, as in
            evaluation no image may count twice.
    """

    def __init__(self, dataset: Dataset, replace: bool) -> None:
        self.dataset = dataset
        self.replace = replace

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, list[Unreadable]]:
        failed: list[Unreadable] = []
        for step in range(len(self) if self.replace else 1):
            try:
                return self.read((index + step) % len(self)), failed
            except UnreadableImageError as error:
                failed.append(Unreadable(error.path, error.reason))
        if self.replace:
            path, reason = failed[0]
            raise ValueError(f"none of the {len(self)} training images can be read; {path}: {reason}")
        return None, failed

    def read(self, index: int) -> Any:
        """The item, or an UnreadableImageError."""
        return self.dataset[index]


class TolerantBatches(Tolerant):
    """Whole batches of images in memory, for a loader with `as_it_is` as its collate_fn: as `collate_readable` makes
    them of single items."""

    dataset: WholeBatches

    def __getitems__(self, indices: list[int]) -> tuple[Any, list[Unreadable]]:
        """A batch of the images that are there, or None where there are none, and all that could not be decoded."""
        found = [self[index] for index in indices]
        there = [index for index, _ in found if index is not None]
        batch = self.dataset.__getitems__(there) if there else None
        return batch, [file for _, failed in found for file in failed]

    def read(self, index: int) -> int:
        """The index, or an UnreadableImageError."""
        self.dataset.images.check(index)
        return index


def collate_readable(items: list[tuple[Any, list[Unreadable]]]) -> tuple[Any, list[Unreadable]]:
    """A batch of the items that are there, or None where there are none, and all that could not be read."""
    there = [item for item, _ in items if item is not None]
    return default_collate(there) if there else None, [file for _, failed in items for file in failed]


class TolerantLoader(SteadyLoader):
    """A loader of a `Tolerant` dataset with `collate_readable`: gives batches of what could be read, records the rest.

    A batch in which nothing can be read does not come at all.

    Args:
        record: Where path and reason are put down, in the main process.
        arguments, options: Those of `SteadyLoader`.
    """

    def __init__(self, *arguments: Any, record: dict[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.record = record

    def __iter__(self) -> Iterator[Any]:
        for batch, failed in super().__iter__():
            self.record.update(failed)
            if batch is not None:
                yield batch
