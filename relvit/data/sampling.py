"""Which training images an epoch shows, in which order and to which process."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from lightning import Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

from relvit.names import did_you_mean

Balance = Literal["none", "sampler", "loss"]


def check_balance(balance: str) -> Balance:
    """The same, if it is one of the allowed names.

    Raises:
        ValueError: It is not.
    """
    allowed = get_args(Balance)
    if balance not in allowed:
        hint = did_you_mean(str(balance), allowed)
        raise ValueError(f"balance is {balance!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
    return balance


def class_weights(labels: Sequence[int], num_classes: int) -> Tensor:
    """``len(labels) / (num_classes * count)`` of each class, float32 (num_classes,); 0 for a class without images."""
    counts = torch.bincount(torch.as_tensor(labels, dtype=torch.int64), minlength=num_classes)
    return torch.where(counts > 0, len(labels) / (num_classes * counts.clamp(min=1).double()), 0.0).float()


class TrainSampler(DistributedSampler):
    """Shuffled indices of an epoch, drawn by weight, repeated, or both, divided among the processes.

    With weights, images are drawn with replacement; without, every one comes once. With ``repeats > 1`` the first
    ``1 / repeats`` of them come so many times, one copy next to the other before they are dealt to the processes in
    turn, so that copies meet in one optimiser step and on different devices (repeated augmentation, Hoffer et al.
    2019, arXiv 1901.09335, in the form of DeiT's sampler: an epoch is as long as without). The order depends on seed
    and epoch alone.

    Args:
        count: Number of images.
        weights: Relative chance of each image, (count,); None: each once.
        repeats: Copies of each image.
        num_replicas: Number of processes.
        rank: Number of this one.
        seed: Another seed gives another order; the same in all processes.
        epoch: The epoch to begin with; Lightning calls ``set_epoch`` later on.
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
    ) -> None:
        # A DistributedSampler, so that Lightning leaves it as it is.
        super().__init__(range(count), num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        self.count = count
        self.weights = weights
        self.repeats = repeats
        self.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        distinct = math.ceil(self.total_size / self.repeats)
        if self.weights is None:
            # More than there are, by less than num_replicas, where all processes are to get equally many.
            chosen = torch.randperm(self.count, generator=generator)[torch.arange(distinct) % self.count]
        else:
            chosen = torch.multinomial(self.weights.double(), distinct, replacement=True, generator=generator)
        order = chosen.repeat_interleave(self.repeats)[: self.total_size]
        return iter(order[self.rank :: self.num_replicas].tolist())


def for_this_process(trainer: Trainer | None) -> dict[str, Any]:
    """Arguments of :class:`TrainSampler` that follow from the trainer; without one, those of a single process."""
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # where Lightning's seed_everything leaves it
    if trainer is None:
        return {"seed": seed}
    # A resumed training asks for its first order before it says which epoch it is in.
    return {
        "num_replicas": trainer.world_size,
        "rank": trainer.global_rank,
        "seed": seed,
        "epoch": trainer.current_epoch,
    }
