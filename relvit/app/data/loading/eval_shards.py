"""Eval shards: divide evaluation over processes, every image once and equally many batches on each device."""

from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler


def shard(count: int, rank: int, processes: int) -> range:
    """Return the indices of the images of a process, which get images in turn."""
    return range(rank, count, processes)


def rank_of(index: int, processes: int) -> int:
    """Return the process that has the image of an index, see `shard`."""
    return index % processes


def images_without_copies(loader: Any) -> int | None:
    """Return the number of images of this process before the copies that `DistributedSampler` appends to its shard.

    Lightning gives this sampler to a user's own loader. Return None if the loader has no such sampler.
    """
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    found = next((each for each in samplers if isinstance(each, DistributedSampler)), None)
    return None if found is None else len(shard(len(found.dataset), found.rank, found.num_replicas))


class EvalShardLoader:
    """DataLoader of one device's shard that yields the same number of batches as the device with the largest shard.

    `DistributedSampler` makes all shards equally long by using some images twice. The shards here may differ by one
    image, so a device may have one batch fewer than other devices, or none. A device without a further batch gets an
    empty batch, because all devices have to take part in collective operations, and Lightning refuses a device without
    batches.

    Args:
        loader: Loader of the shard of this device.
        batches: Number of batches on every device.
        empty: An empty batch.
    """

    def __init__(self, loader: DataLoader[Any], batches: int, empty: Any) -> None:
        self.loader = loader
        self.batches = batches
        self.empty = empty

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        # A loader that skips unreadable images may give fewer batches than its length, so append empty batches up to
        # `batches`.
        return islice(chain(self.loader, repeat(self.empty)), self.batches)
