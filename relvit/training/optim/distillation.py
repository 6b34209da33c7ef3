"""Distillation from a teacher, as DeiT does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.models import build_model
from relvit.models.weights.transfer import transfer_weights
from relvit.training.checkpoints.pretrained import Pretrained
from relvit.utils.messages import did_you_mean, listing

KINDS = ("hard", "soft")


def distillation_loss(
    loss: Tensor,
    student: Tensor,
    teacher: Tensor,
    kind: Literal["hard", "soft"] = "hard",
    weight: float = 0.5,
    temperature: float = 3.0,
) -> Tensor:
    """The loss of the labels and that of the teacher together (Touvron et al. 2021, arXiv 2012.12877, section 4).

    - 'hard', equation 3: `(1 - weight) loss + weight CE(student, argmax teacher)`; in the paper weight is 1/2.
    - 'soft', equation 2: `(1 - weight) loss + weight T^2 KL(softmax(teacher / T) || softmax(student / T))`; in the
      paper weight is 0.1 and T is 3. (Its code divides this term by the number of classes as well.)

    Both are means over the images.

    Args:
        loss: of the labels, a scalar.
        student: logits (B, num_classes).
        teacher: logits (B, num_classes), of the same images.
        kind: 'hard' or 'soft'.
        weight: of the teacher, in 0 ... 1.
        temperature: T, for 'soft' alone.
    """
    student, teacher = student.float(), teacher.float()
    if kind == "hard":
        distance = F.cross_entropy(student, teacher.argmax(-1))
    else:
        parts = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))
        distance = temperature**2 * F.kl_div(*parts, reduction="batchmean", log_target=True)
    return (1 - weight) * loss + weight * distance


def check_distillation(kind: str, weight: float, temperature: float) -> None:
    """Refuse what `distillation_loss` could not compute.

    Raises:
        ValueError: an unknown kind, numbers out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"distill must be one of {listing(KINDS)}, got {kind!r}{did_you_mean(str(kind), KINDS)}")
    if not 0 < weight <= 1:
        raise ValueError(f"distill_weight must be in 0 < x <= 1, got {weight}")
    if not temperature > 0:
        raise ValueError(f"distill_temperature must be positive, got {temperature}")


class Teacher:
    """A trained classifier that is asked and never trained, for images that are normalised for the student.

    It is no submodule of anything: checkpoints of the student do not hold it.

    Args:
        pretrained: the classifier, see `Pretrained`; not a file of plain weights.
        class_names: classes of the student in order, if they have names.
        num_classes: how many they are.
        img_size: size of the images.
        mean: normalisation of the images, for which the student is trained; None: that of the teacher.
        std: likewise.

    Raises:
        FileNotFoundError: no such file.
        ValueError: weights that cannot be had, or of other classes.
    """

    def __init__(
        self,
        pretrained: str,
        num_classes: int,
        img_size: int | Sequence[int] | None = None,
        class_names: Sequence[str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        source = Pretrained(pretrained)
        weights, architecture = source.weights(), source.architecture()
        channels = weights.input_size[0] if weights.input_size else 3
        self.net: nn.Module = build_model(
            architecture.model, num_classes, channels, img_size, architecture.model_kwargs, architecture.retrofit
        )
        report = transfer_weights(self.net, weights, class_names)
        if report.new:
            theirs = f" {listing(weights.class_names)}" if weights.class_names else ""
            raise ValueError(
                f"the teacher {pretrained} was trained on other classes{theirs} than the {num_classes} here: "
                f"it lacks {listing(report.new, 2)}"
            )
        self.net.eval().requires_grad_(False)
        # Student's pixels -> the teacher's, as one factor and one offset per channel.
        self.scale, self.offset = torch.ones(1), torch.zeros(1)
        if mean and std and weights.mean and weights.std:
            center, spread, their_center, their_spread = (
                torch.tensor(values).view(-1, 1, 1) for values in (mean, std, weights.mean, weights.std)
            )
            self.scale, self.offset = spread / their_spread, (center - their_center) / their_spread

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> logits (B, num_classes)."""
        return self.net(images * self.scale.to(images) + self.offset.to(images))
