"""Mixup and cutmix on a batch, with soft targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from relvit.training.loss import soft_targets


class BatchMixing:
    """Mixes every image of a batch with its neighbour, and their targets likewise.

    Mixup (Zhang et al. 2018, arXiv 1710.09412) blends the two with a share from Beta(alpha, alpha); cutmix (Yun et al.
    2019, arXiv 1905.04899) pastes a rectangle whose share of the area is from Beta(alpha, alpha).

    Args:
        num_classes: number of classes.
        mixup_alpha: mixup's alpha; 0: no mixup.
        cutmix_alpha: cutmix's alpha; 0: no cutmix.
        prob: probability that a batch is mixed at all.
        switch_prob: probability of cutmix, where both are on.
        label_smoothing: share of each target that is spread over all classes.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        num_classes: int,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        label_smoothing: float = 0.0,
    ) -> None:
        for name, value in (("mixup", mixup_alpha), ("cutmix", cutmix_alpha)):
            if value < 0:
                raise ValueError(f"{name} must be 0 (off) or positive, got {value}")
        for name, value in (("mix_prob", prob), ("mix_switch_prob", switch_prob)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability, in 0 <= x <= 1, got {value}")
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.mixup = v2.MixUp(alpha=mixup_alpha) if mixup_alpha else None
        self.cutmix = v2.CutMix(alpha=cutmix_alpha) if cutmix_alpha else None
        self.prob = prob
        self.cutmix_share = switch_prob if mixup_alpha and cutmix_alpha else float(cutmix_alpha > 0)

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,) -> images of the same shape and targets (B, num_classes)."""
        targets = soft_targets(labels, self.num_classes, self.label_smoothing)
        mix, which = torch.rand(2).tolist()
        if mix >= self.prob:
            return images, targets
        transform = self.cutmix if which < self.cutmix_share else self.mixup
        return transform(images, targets)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Random numbers of the CPU that depend on `key` alone; outside they go on as if nothing had been drawn.

    So what is drawn at a step does not depend on what was drawn before it, and a resumed run draws the same.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the other devices as well, which are not put back.
        torch.default_generator.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        yield
