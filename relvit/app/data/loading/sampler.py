"""Training sampler: which images an epoch shows, in which order and process; where in an epoch a step stands."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning import Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

from relvit.app.data.loading.deterministic import SeededIndex

Balance = Literal["none", "sampler", "loss"]


def class_weights(labels: Sequence[int], num_classes: int) -> Tensor:
    """Compute ``len(labels) / (classes * count)`` of each class, float32 (num_classes,), and 0 where count is 0.

    Only classes with labels count as `classes`, so the mean of the weights over all labels is one.

    Raises:
        ValueError: A label is not the number of a class.
    """
    values = np.asarray(labels)
    whole = values.ndim == 1 and values.dtype.kind in "iu"
    if wrong := (values[(values < 0) | (values >= num_classes)] if whole else values).tolist():
        raise ValueError(f"targets must be from 0 to {num_classes - 1}, the numbers of the classes, got {wrong[0]!r}")
    counts = torch.bincount(torch.as_tensor(values, dtype=torch.int64), minlength=num_classes)
    classes = counts.count_nonzero()
    return torch.where(counts > 0, len(labels) / (classes * counts.clamp(min=1).double()), 0.0).float()


class TrainSampler(DistributedSampler[Any]):
    """Sampler that shuffles an epoch's images, optionally weighted or repeated, and divides them among the processes.

    The sampler yields a `SeededIndex` for each image. With weights, images are sampled with replacement; without
    weights, every image comes once. With ``repeats > 1`` only the first ``1 / repeats`` of the shuffled images come,
    each `repeats` times, so an epoch is as long as without repeats. The copies of an image are neighbours in the order,
    and the processes take the images of the order in turn. So the copies are used in the same optimiser step by
    different devices (repeated augmentation, Hoffer et al. 2019, arXiv 1901.09335, as in DeiT's sampler). The order
    depends only on seed and epoch, so to resume a training within an epoch, a checkpoint needs no state of the sampler:
    it holds the epoch and the batch (`ImageData.state_dict`), from which `ImageData.train_dataloader` makes `epoch` and
    `start`. The length of the sampler is the length of an epoch.

    Args:
        count: Number of images.
        weights: Relative probability of each image, (count,); None: every image comes once.
        repeats: Copies of each image.
        num_replicas: Number of processes.
        rank: Number of this process.
        seed: Another seed gives another order. All processes must have the same seed.
        epoch: The epoch to begin with; Lightning calls ``set_epoch`` later on.
        start: The number of images that this process skips at the beginning of `epoch`, because the training has used
            these images already.
    """

    def __init__(
        self,
        count: int,
        weights: Tensor | None = None,
        repeats: int = 1,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        epoch: int = 0,
        start: int = 0,
    ) -> None:
        # This class derives from `DistributedSampler`, because on several devices Lightning replaces any other sampler.
        super().__init__(range(count), num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        self.count = count
        self.weights = weights
        self.repeats = repeats
        self.first_epoch = epoch
        self.start = start
        self.set_epoch(epoch)

    def __iter__(self) -> Iterator[SeededIndex]:
        # Read the epoch once, since a later call of `set_epoch` must affect only later iterators.
        epoch = self.epoch
        generator = torch.Generator().manual_seed(self.seed + epoch)
        distinct = math.ceil(self.total_size / self.repeats)
        if self.weights is None:
            # If `count` is not a multiple of `num_replicas`, the first images come a second time, so that all processes
            # get the same number of images.
            chosen = torch.randperm(self.count, generator=generator)[torch.arange(distinct) % self.count]
        else:
            chosen = torch.multinomial(self.weights.double(), distinct, replacement=True, generator=generator)
        order = chosen.repeat_interleave(self.repeats)[: self.total_size].tolist()
        skipped = self.start if epoch == self.first_epoch else 0
        positions = range(self.rank, self.total_size, self.num_replicas)[skipped:]
        return (SeededIndex(order[position], epoch, position) for position in positions)


def training_position(trainer: Trainer) -> tuple[int, int]:
    """Return the epoch to resume in, and the number of its batches, on each device, that optimiser steps have used.

    Batches whose gradients are still being accumulated do not count. At the end of an epoch, return batch 0 of the next
    epoch.
    """
    loop = trainer.fit_loop
    epochs, done = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current.processed
    if epochs.started == epochs.processed:
        return epochs.processed, 0
    if not all_batches_done(trainer):
        done -= done % trainer.accumulate_grad_batches
    return epochs.processed, done


def all_batches_done(trainer: Trainer) -> bool:
    """Return whether all batches of the current epoch are done."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    if math.isfinite(trainer.num_training_batches):
        return done >= trainer.num_training_batches
    # If data have no length, Lightning marks the last batch as the last one when it loads the batch, so also check that
    # the batch is processed.
    return progress.is_last_batch and 0 < done == progress.current.ready
