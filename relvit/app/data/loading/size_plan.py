"""Training at several image sizes: one size per optimiser step, with about the same number of tokens in each batch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.utils.data import Dataset

from relvit.app.data.loading.deterministic import SeededIndex
from relvit.app.data.loading.sampler import TrainSampler
from relvit.app.data.transforms import parse_size
from relvit.utils.messages import check_choice

SizeSchedule = Literal["random", "progressive"]
Size = tuple[int, int]


class SizedBatch(NamedTuple):
    """Image size of a batch, and the images that it is made of."""

    size: Size
    indices: list[SeededIndex]


class SizePlan:
    """Image size and number of images of every batch of a training.

    A batch at `img_size` has `batch_size` images. At any other size, a batch has so many images that their total area
    is about the same, but at least one image. An epoch is a fixed number of batches. With 'random' every image comes
    about once per epoch: some images may be missing, some may come twice. The plan depends only on its arguments, so it
    is the same in all processes.

    Args:
        sizes: Height and width of each size.
        schedule: 'random': among every ``len(sizes)`` optimiser steps, each size comes once, in random order.
            'progressive': the sizes come from the smallest to the largest, each for an equal part of the training (Tan
            and Le 2021, arXiv 2104.00298, section 4); an epoch at small sizes then shows images several times.
        img_size: Height and width that `batch_size` is meant for.
        batch_size: Number of images in a batch at `img_size`.
        images: Images per epoch of one device.
        accumulated: Batches per optimiser step; all batches of a step have the same image size.
        seed: Another seed gives another order of sizes.
        epochs: Epochs of the training; None or -1: no limit.
        steps: Optimiser steps of the training; None or -1: no limit. Only 'progressive' needs one of the limits.

    Raises:
        ValueError: `schedule` is 'progressive', and there is no limit.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        schedule: SizeSchedule,
        img_size: Size,
        batch_size: int,
        images: int,
        accumulated: int = 1,
        seed: int = 0,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> None:
        self.sizes: list[Size] = sorted(sizes, key=lambda size: (math.prod(size), size))
        self.schedule = schedule
        self.batch_size = batch_size
        self.accumulated = accumulated
        self.seed = seed
        area = batch_size * math.prod(img_size)
        self.images: list[int] = [max(1, round(area / math.prod(size))) for size in self.sizes]
        self.batches: int = max(1, round(images * len(self.sizes) / sum(self.images)))
        # `ends` lists the numbers of batches after which the limit of epochs, and the limit of steps, would end the
        # training.
        ends = [epochs * self.batches] if epochs and epochs > 0 else []
        if steps and steps > 0:
            whole, rest = divmod(steps, math.ceil(self.batches / accumulated))
            ends.append(whole * self.batches + rest * accumulated)
        if schedule == "progressive" and not ends:
            raise ValueError(
                "size_schedule 'progressive' divides the training among the sizes: give max_epochs or max_steps"
            )
        self.total: int | None = min(ends, default=None)

    def epoch(self, epoch: int) -> list[tuple[Size, int]]:
        """Return the size and the number of images of each batch of an epoch, for one device."""
        count, steps = len(self.sizes), math.ceil(self.batches / self.accumulated)
        if self.schedule == "progressive":
            first = epoch * self.batches
            chosen = [min(count - 1, (first + step * self.accumulated) * count // self.total) for step in range(steps)]
        else:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            rows = [torch.randperm(count, generator=generator) for _ in range(math.ceil(steps / count))]
            chosen = torch.cat(rows)[:steps].tolist()
        of_batch = (chosen[batch // self.accumulated] for batch in range(self.batches))
        return [(self.sizes[number], self.images[number]) for number in of_batch]


class SizedBatchSampler(TrainSampler):
    """Batches of a `SizePlan` as `SizedBatch`, divided among the processes, for a DataLoader with `batch_size=None`.

    Args:
        plan: Sizes and numbers of images.
        arguments: Positional arguments of `TrainSampler`, such as `count`.
        start: Number of batches that this process skips at the beginning of the first epoch.
        options: Further arguments of `TrainSampler`.
    """

    def __init__(self, plan: SizePlan, *arguments: Any, start: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.plan = plan
        self.batch_size: int = plan.batch_size
        self.first_batch = start

    def __len__(self) -> int:
        return self.plan.batches

    def __iter__(self) -> Iterator[SizedBatch]:
        batches = self.plan.epoch(self.epoch)
        self.total_size: int = self.num_replicas * sum(images for _, images in batches)
        skipped = self.first_batch if self.epoch == self.first_epoch else 0
        self.start: int = sum(images for _, images in batches[:skipped])
        indices = super().__iter__()
        return (SizedBatch(size, list(islice(indices, images))) for size, images in batches[skipped:])


class SizedBatches(Dataset[Any]):
    """Dataset of batches: its index is a `SizedBatch`, its item the collated images at the size of that batch.

    Args:
        datasets: For each size, a dataset of images of this size with the method `__getitems__`.
        collate: The collate function of the items of these datasets.
    """

    def __init__(self, datasets: Mapping[Size, Dataset[Any]], collate: Callable[[Any], Any]) -> None:
        self.datasets: dict[Size, Dataset[Any]] = dict(datasets)
        self.collate = collate

    def __getitem__(self, batch: SizedBatch) -> Any:
        return self.collate(self.datasets[batch.size].__getitems__(batch.indices))


def check_sizes(
    train_sizes: Sequence[int | tuple[int, int]] | None, schedule: SizeSchedule
) -> list[tuple[int, int]] | None:
    """Return the sizes to train at as (height, width).

    Raises:
        ValueError: `train_sizes` is empty, has a size twice, or has something other than positive integers; or the
            schedule is unknown, or is given without `train_sizes` and is not 'random'.
    """
    check_choice("size_schedule", schedule, get_args(SizeSchedule))
    if train_sizes is None:
        if schedule != "random":
            raise ValueError(f"size_schedule {schedule!r} has no effect without train_sizes: give both or neither")
        return None
    sizes = [parse_size(size, "train_sizes") for size in train_sizes]
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"train_sizes is {list(train_sizes)}; give one or more sizes, each once")
    return sizes
