"""Training images whose augmentation follows from seed, epoch and place in the epoch's order."""

from typing import Any, NamedTuple

from torch.utils.data import Dataset

from relvit.utils.seeding import seeded


class Draw(NamedTuple):
    """What a sampler asks of a dataset: an image, for one place in the order of one epoch (over all processes).

    The place, since an image may come several times in an epoch, augmented in its own way each time.
    """

    index: int
    epoch: int
    place: int


class Draws(Dataset):
    """A dataset asked by `Draw` instead of by index.

    Whatever is drawn at random to make an item depends on seed, epoch and place alone: not on what was loaded before,
    nor on which worker loads it. Batches that the dataset makes at once (``__getitems__``) depend on the place of their
    first image.

    Args:
        dataset: Asked by index; may draw from the generators of Python, NumPy and PyTorch's CPU.
        seed: Of the run.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> Any:
        with seeded(self.seed, draw.epoch, draw.place):
            return self.dataset[draw.index]

    def __getitems__(self, draws: list[Draw]) -> Any:
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None:
            return [self[draw] for draw in draws]
        with seeded(self.seed, draws[0].epoch, draws[0].place):
            return at_once([draw.index for draw in draws])
