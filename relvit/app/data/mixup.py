"""Mixup, CutMix and label smoothing of a training batch."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchvision.transforms import v2

from relvit.app.utils.number_types import NonNegativeFloat, Share, ShareBelowOne, check_ranges
from relvit.utils.ranges import Range


class BatchMix(nn.Module):
    """Mix each image of a batch with another one, and the labels in the same proportion.

    A call with images and labels returns mixed images and targets, in the same order, and does not change the given
    tensors. Images are float (B, C, H, W), before and after mixing. Labels int64 (B,) become targets float32 (B,
    num_classes), whose rows sum to one. Labels of multi-label images are bool (B, num_classes), and the rows of their
    targets can have any sum. Each image x_i is mixed with a random other image x_j of the batch. The proportion lam is
    drawn once for the whole batch, from Beta(alpha, alpha) with the alpha of mixup or of CutMix:

    - mixup (Zhang et al. 2017, arXiv 1710.09412): ``lam x_i + (1 - lam) x_j``
    - CutMix (Yun et al. 2019, arXiv 1905.04899): a rectangle of x_i is replaced by the same rectangle of x_j. The
      rectangle's area is the share 1 - lam of the image, or less if the rectangle extends beyond the border; lam is
      then set to the share of x_i that is left

    The labels are smoothed as in Szegedy et al. 2016 (arXiv 1512.00567), whether the batch is mixed or not: the share
    `label_smoothing` is spread over all classes. torchvision mixes the images, on their device; random numbers come
    from PyTorch's CPU generator. The defaults are the same as in DeiT. Use `BatchMix` in training only.

    Examples:
        >>> mix = BatchMix(num_classes=10)
        >>> images, targets = mix(torch.rand(4, 3, 24, 32), torch.tensor([1, 2, 3, 4]))
        >>> targets.sum(1)
        tensor([1., 1., 1., 1.])

    Args:
        num_classes: Number of classes.
        mixup_alpha: Mixup's alpha; 0 for no mixup.
        cutmix_alpha: CutMix's alpha; 0 for no CutMix.
        prob: Probability that a batch is mixed at all.
        switch_prob: Probability that a mixed batch is mixed by CutMix, if both mixup and CutMix are on.
        label_smoothing: Share of each label that is spread evenly over all classes.

    Raises:
        ValueError: An argument is out of its range; or, in a call, images or labels have other shapes than described in
            `forward`.
    """

    def __init__(
        self,
        num_classes: Annotated[int, Range(2)],
        mixup_alpha: NonNegativeFloat = 0.8,
        cutmix_alpha: NonNegativeFloat = 1.0,
        prob: Share = 1.0,
        switch_prob: Share = 0.5,
        label_smoothing: ShareBelowOne = 0.1,
    ) -> None:
        super().__init__()
        check_ranges(BatchMix.__init__, locals())
        self.num_classes = num_classes
        self.prob: float = prob if mixup_alpha or cutmix_alpha else 0.0
        self.cutmix_share: float = switch_prob if mixup_alpha and cutmix_alpha else float(cutmix_alpha > 0)
        self.label_smoothing = label_smoothing
        self.mixup: v2.MixUp | None = v2.MixUp(alpha=mixup_alpha, num_classes=num_classes) if mixup_alpha else None
        self.cutmix: v2.CutMix | None = v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes) if cutmix_alpha else None

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images, float (B, C, H, W), and labels, int64 (B,) or bool (B, num_classes), see `BatchMix`."""
        several = labels.dtype == torch.bool
        if images.ndim != 4 or labels.shape != (len(images), *[self.num_classes] * several):
            raise ValueError(
                f"images have shape {tuple(images.shape)}, and labels shape {tuple(labels.shape)} of {labels.dtype}: "
                f"give images (B, C, H, W), and labels as integers (B,) or as bool (B, {self.num_classes})"
            )
        mixed, which = torch.rand(2).tolist()
        if mixed < self.prob:
            # torchvision mixes each image with the image before it in the batch, which with repeated augmentation is
            # often a copy of the same image. So shuffle the batch first. The order comes from the CPU's generator, as
            # do all other random numbers here.
            order = torch.randperm(len(images)).to(images.device)
            back = order.argsort()
            mix = self.cutmix if which < self.cutmix_share else self.mixup
            images, targets = (tensor[back] for tensor in mix(images[order], labels[order]))
        else:
            targets = labels.float() if several else one_hot(labels, self.num_classes).float()
        return images, targets * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, prob={self.prob}, label_smoothing={self.label_smoothing}"
