"""Deterministic augmentation: random items depend on seed, epoch and position, not on the worker."""

from typing import Any, NamedTuple

from torch.utils.data import Dataset

from relvit.app.data.loading.user_dataset import LoadedDataset
from relvit.app.utils.seeding import seeded


class SeededIndex(NamedTuple):
    """Index of an image, with the epoch and its position in the epoch's order over all processes, as seeds.

    The position is part of the seed, so an image that comes several times in an epoch is augmented differently each
    time.
    """

    index: int
    epoch: int
    position: int


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
