"""Knowledge distillation as in DeiT: the loss with a teacher, and the teacher, a trained classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.app.data import parse_size
from relvit.app.data.class_labels import known_names
from relvit.app.models import build_model, check_image_size
from relvit.app.training.checkpoints.description import normalisation_of
from relvit.app.training.checkpoints.pretrained import Pretrained
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.progress import rank_zero_print
from relvit.models import transfer_weights
from relvit.utils.messages import listing

Distill = Literal["hard", "soft"]


def distillation_loss(
    loss: Tensor,
    student: Tensor,
    teacher: Tensor,
    kind: Distill = "hard",
    weight: float = 0.5,
    temperature: float = 3.0,
) -> Tensor:
    """Combine the losses of the labels and of the teacher (Touvron et al. 2021, arXiv 2012.12877, section 4).

    - 'hard', equation 3: `(1 - weight) loss + weight CE(student, argmax teacher)`; in the paper weight is 1/2.
    - 'soft', equation 2: `(1 - weight) loss + weight T^2 KL(softmax(teacher / T) || softmax(student / T))`; in the
      paper weight is 0.1 and T is 3. (The paper's code also divides this term by the number of classes.)

    Args:
        loss: The mean loss of the labels.
        student: The student's logits (B, num_classes).
        teacher: The teacher's logits (B, num_classes).
        kind, weight, temperature: See `distill`, `distill_weight` and `distill_temperature` of `ImageClassifier`.
    """
    student, teacher = student.float(), teacher.float()
    if kind == "hard":
        distance = F.cross_entropy(student, teacher.argmax(-1))
    else:
        parts = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))
        distance = temperature**2 * F.kl_div(*parts, reduction="batchmean", log_target=True)
    return (1 - weight) * loss + weight * distance


def build_teacher(hparams: Mapping[str, Any], data: Any) -> Teacher:
    """Build the teacher of an `ImageClassifier` with these arguments, for the classes and images of these data.

    Raises:
        ValueError: The teacher does not take images of a size, or of the channels, of the training. For other errors
            see `Teacher`.
    """
    size, names = attribute_of(data, "img_size") or hparams["img_size"], known_names(hparams["class_names"], data)
    mean, std = normalisation_of(data, hparams["in_chans"])
    teacher = Teacher(hparams["teacher"], hparams["num_classes"], size, names, mean, std)
    if teacher.channels != hparams["in_chans"]:
        raise ValueError(
            f"the teacher {hparams['teacher']} was trained with in_chans {teacher.channels}, the data have "
            f"{hparams['in_chans']}: give a teacher that was trained on such images"
        )
    if names is not None and not teacher.class_names:
        rank_zero_print(
            f"Note: the teacher {hparams['teacher']} does not name its classes, so its outputs are taken to be "
            f"{listing(names, 3)}, in this order"
        )
    for each in attribute_of(data, "train_sizes") or [size]:
        try:
            if each is not None:
                check_image_size(teacher.net, parse_size(each), teacher.channels, size)
        except ValueError as error:
            # Keep only the reason in the error, because the advice after it is for the student.
            reason = str(error).partition(": ")[0]
            raise ValueError(
                f"the teacher {hparams['teacher']} does not fit the images, as {reason}: give other sizes (img_size, "
                "train_sizes), or another teacher"
            ) from error
    return teacher


class Teacher:
    """A trained classifier that is only evaluated, on images that are normalised for the student.

    The teacher is not a submodule of the student, so checkpoints of the student do not contain it.

    Args:
        pretrained: The teacher, see `Pretrained`; not a file of plain weights.
        num_classes, img_size, class_names: Classes and image size of the student, as in `ImageClassifier`.
        mean, std: The normalisation of the student's images. None: the normalisation of the teacher's images.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The weights cannot be fetched or read, or belong to other classes or to images of several labels.
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
        if source.thresholds is not None:
            raise ValueError(
                f"the teacher {pretrained} was trained on images of several labels each, the student learns one label: "
                "give a teacher of one label per image"
            )
        weights, architecture = source.weights(), source.architecture()
        self.class_names: list[str] | None = weights.class_names
        self.channels: int = weights.input_size[0] if weights.input_size else 3
        sizes = num_classes, self.channels, img_size
        self.net: nn.Module = build_model(architecture.model, *sizes, architecture.model_kwargs, architecture.retrofit)
        report = transfer_weights(self.net, weights, class_names)
        if report.new:
            theirs = f" {listing(weights.class_names)}" if weights.class_names else ""
            raise ValueError(
                f"the teacher {pretrained} was trained on other classes{theirs} than the {num_classes} here: "
                f"it lacks {listing(report.new, 2)}; take a teacher of exactly these classes"
            )
        self.net.eval().requires_grad_(False)
        # The images have the student's normalisation: multiplied by `scale`, plus `offset`, they have the teacher's.
        self.scale: Tensor = torch.ones(1)
        self.offset: Tensor = torch.zeros(1)
        if mean and std and weights.mean and weights.std:
            center, spread, their_center, their_spread = (
                torch.tensor(values).view(-1, 1, 1) for values in (mean, std, weights.mean, weights.std)
            )
            self.scale, self.offset = spread / their_spread, (center - their_center) / their_spread

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Compute the logits (B, num_classes) of images (B, C, height, width)."""
        return self.net(images * self.scale.to(images) + self.offset.to(images))
