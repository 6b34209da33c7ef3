"""Evaluation on several devices: every image once, and the same number of batches on each device."""

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class ShareLoader:
    """One device's share of the images, in as many batches as the device with the largest share has.

    `DistributedSampler` makes shares equal by counting some images twice. Here they differ by up to one image; where
    that leaves a device with a batch fewer, or with none, an empty batch takes its place, so that all devices take part
    in whatever they do together at a step or at the end. (Lightning refuses a device that has no batches.)

    Args:
        loader: this device's images.
        batches: number of batches on every device, see :func:`batches_per_rank`.
        nothing: an empty batch.
    """

    def __init__(self, loader: DataLoader, batches: int, nothing: Any) -> None:
        self.loader = loader
        self.batches = batches
        self.nothing = nothing

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        # Counted, since a loader that skips unreadable images may give fewer batches than it has.
        given = 0
        for batch in self.loader:
            given += 1
            yield batch
        for _ in range(self.batches - given):
            yield self.nothing


def batches_per_rank(count: int, world: int, batch_size: int) -> int:
    """Batches that the largest share has when `count` images are dealt out to `world` devices."""
    return math.ceil(math.ceil(count / world) / batch_size)
