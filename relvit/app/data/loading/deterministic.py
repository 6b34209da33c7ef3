"""Datasets as loaders need them: errors do not end an epoch early, and augmentation does not depend on the worker."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from relvit.app.utils.seeding import seeded


class SeededIndex(NamedTuple):
    """Index of an image, with the epoch and its position in the epoch's order over all processes, as seeds.

    The position is part of the seed, so an image that comes several times in an epoch is augmented differently each
    time.
    """

    index: int
    epoch: int
    position: int


class LoadedDataset(Dataset[Any]):
    """Dataset with the items of another one, in which StopIteration becomes RuntimeError.

    A loader takes a StopIteration for the end of the images, and would silently leave out the rest of them.

    Args:
        dataset: A map-style dataset.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._read(self.dataset.__getitem__, index)

    def __getitems__(self, indices: list[Any]) -> Any:
        at_once = getattr(self.dataset, "__getitems__", None)
        return [self[index] for index in indices] if at_once is None else self._read(at_once, indices)

    def _read(self, read: Callable[[Any], Any], wanted: Any) -> Any:
        try:
            return read(wanted)
        except StopIteration as error:
            item = f"item {wanted}" if isinstance(wanted, int) else f"one of the items {wanted}"
            raise RuntimeError(
                f"{item} of {type(self.dataset).__name__} raises StopIteration: correct the code that makes the item"
            ) from error


class DeterministicDataset(LoadedDataset):
    """Dataset whose random items depend only on seed, epoch and position, not on the worker or on items loaded before.

    If the wrapped dataset makes a whole batch at once (``__getitems__``), the random numbers of the batch depend on the
    position of its first image.

    Args:
        dataset: A map-style dataset, which may use the generators of Python, NumPy and PyTorch's CPU.
        seed: Seed of the run.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        super().__init__(dataset)
        self.seed = seed

    def __getitem__(self, item: SeededIndex) -> Any:
        with seeded(self.seed, item.epoch, item.position):
            return super().__getitem__(item.index)

    def __getitems__(self, items: list[SeededIndex]) -> Any:
        if not hasattr(self.dataset, "__getitems__"):
            return [self[item] for item in items]
        with seeded(self.seed, items[0].epoch, items[0].position):
            return super().__getitems__([item.index for item in items])
