"""`BaseClassifier`: logits, probabilities, features and evaluation steps of trained models and exported files."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed
from lightning.fabric.utilities import move_data_to_device
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn
from torchmetrics import MetricCollection

from relvit.app.data import ImageData
from relvit.app.data.batches import ImageBatch, image_count, mirrored, pair_of
from relvit.app.data.modules.base import Split
from relvit.app.models import at_image_size, check_image_size
from relvit.app.training.checkpoints.checkpoint import Checkpoint
from relvit.app.training.labels import Labels, labels_in
from relvit.app.training.metrics import EpochMetrics
from relvit.app.training.optim.ema import WeightAverage
from relvit.app.training.optim.loss import evaluation_loss
from relvit.app.training.run.data_record import unreadable_sentence
from relvit.app.utils.shown_text import cut, one_line, visible
from relvit.models import Reach, set_reach


class BaseClassifier(EpochMetrics):
    """Base class of `ImageClassifier` and `ExportedClassifier`, whose `forward` computes the logits of images.

    For `relvit fit`, `validate`, `test` and `predict`, Lightning's Trainer runs the steps of validation, test and
    prediction on any number of devices. The callbacks `EvaluationReport` and `PredictionTable` write the results of
    these steps into files. `relvit.load`, `embed`, `demo`, `resolutions`, `probe`, `calibrate` and `export --int8` have
    no Trainer: the function `run_batches` loops over the batches.

    Attributes:
        average: The averaged weights; None in a training without averaging.
        mirror: Whether the Trainer's steps average the probabilities of each image and its mirror image.
        absent: Bool (num_classes,), True for classes that no image has and that must never be predicted. None: all
            classes may be predicted.
    """

    average: WeightAverage | None = None
    mirror: bool = False
    absent: Tensor | None = None

    @property
    def has_own_steps(self) -> bool:
        """Whether a subclass overrides relvit's steps of validation or test."""
        names = ("validation_step", "test_step")
        return any(getattr(type(self), name) is not getattr(BaseClassifier, name) for name in names)

    @property
    def score(self) -> str:
        """The metric that chooses the best checkpoint: 'acc1', or 'map' where images have several labels."""
        return self.labels.score

    @property
    def evaluated(self) -> nn.Module:
        """The model that evaluation uses: with the averaged weights where a training keeps an average."""
        return self.net if self.average is None else self.average.net

    def at_size(self, img_size: tuple[int, int]) -> BaseClassifier:
        """Return a classifier in evaluation mode whose model takes images of another size, see `at_image_size`."""
        found = copy.copy(self.eval())
        net = at_image_size(self.evaluated, img_size, self.hparams.in_chans, self.hparams.img_size)
        found._modules = self._modules | {"net": net}
        found.average = None
        return found

    def check_size(self, img_size: tuple[int, int]) -> None:
        """Refuse images of a size (height, width) that the model does not take."""
        check_image_size(self.evaluated, img_size, self.hparams.in_chans, self.hparams.img_size)

    def set_reach(self, reach: Reach, checkpoint: Checkpoint) -> None:
        """Choose how attention works at other sizes than in the training of the checkpoint."""
        if reach != "trained":
            checkpoint.check_reach(reach)
            set_reach(self.evaluated, reach, checkpoint.transforms().img_size)

    def features(self, images: ImageBatch) -> Tensor:
        """Compute the pooled features before the classifier, see `finite_features`."""
        return finite_features(self.evaluated, images, self.device)

    def logits(self, images: ImageBatch, mirror: bool = False) -> Tensor:
        """Compute the logits (B, num_classes) of a batch on any device, which may be empty.

        With `mirror`, return the float32 logits of the mean of two probabilities: the image's and its mirror image's.
        """
        # If a process has fewer batches than other processes, it gets empty batches in place of the missing ones.
        # Not all models can compute empty batches, so return empty logits.
        if not image_count(images):
            return torch.empty(0, self.hparams.num_classes, device=self.device)
        images = move_data_to_device(images, self.device)
        found = [self(view) for view in ((images, mirrored(images)) if mirror else (images,))]
        if self.absent is not None:
            # Leave the absent classes out of each view before the mean. Otherwise a view that gives the absent classes
            # a smaller probability would weigh more, because its other classes have larger probabilities.
            found = [logits.masked_fill(self.absent.to(logits.device), -math.inf) for logits in found]
        return self.labels.mean_logits(torch.stack(found).float()) if mirror else found[0]

    def probabilities(self, images: ImageBatch, mirror: bool = False) -> Tensor:
        """Compute the probabilities (B, num_classes), float32, of a batch; arguments as of `logits`."""
        return self.labels.probabilities(self.logits(images, mirror))

    def labelled(self, batch: Any, training: bool = False) -> tuple[ImageBatch, Tensor]:
        """Return the images and the labels of a batch, see `pair_of` and `Labels.checked`."""
        images, labels = pair_of(batch, "labels")
        return images, _checked(self.labels, labels, self.hparams.num_classes, training)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if not self._is_fitting or not torch.distributed.is_initialized():
            return
        # All processes must validate the same model, but each computes batch norm's statistics from its own images. DDP
        # copies the statistics of the main process before a forward pass, but neither to the averaged network nor after
        # a batch that only accumulates gradients.
        for buffer in self.evaluated.buffers():
            of_main = buffer.contiguous()
            torch.distributed.broadcast(of_main, 0)
            buffer.copy_(of_main)

    def validation_step(self, batch: tuple[ImageBatch, Tensor], batch_idx: int) -> Tensor:
        """Return the logits of a batch, which callbacks get as `outputs`."""
        return self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: tuple[ImageBatch, Tensor], batch_idx: int) -> Tensor:
        """Return the logits of a batch."""
        return self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: tuple[ImageBatch, list[str]], batch_idx: int) -> dict[str, Any]:
        """Return the names of the images of a batch, which may be empty, and their probabilities (B, num_classes)."""
        images, names = pair_of(batch, "names")
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"items to predict are pairs of an image and its name (str), got {type(names).__name__}: call the "
                "module on images for logits, or predict a DatasetData, which names the images"
            )
        return {"names": list(names), "probabilities": self.probabilities(images, self.mirror)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; for weights of another model raise ValueError instead of PyTorch's RuntimeError."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise ValueError(f"the weights do not fit this model: {one_line(error)[:300]}") from error

    def _evaluate(self, metrics: MetricCollection, batch: tuple[ImageBatch, Tensor]) -> Tensor:
        images, labels = self.labelled(batch)
        logits = self.logits(images, self.mirror)
        own = self.without_copies(len(labels))
        self.count_evaluated(metrics, evaluation_loss(logits[:own], labels[:own]), logits[:own], labels[:own])
        return logits


def _checked(of: Labels, labels: Any, num_classes: int, training: bool = False) -> Tensor:
    """Return the labels of a batch, which may be empty, see `Labels.checked`."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"the labels of a batch must be a tensor, got {cut(labels)}: give numbers of classes")
    return of.checked(labels, num_classes, training) if len(labels) else labels


def finite_features(net: nn.Module, images: ImageBatch, device: torch.device | str) -> Tensor:
    """Compute the pooled features before the classifier of a batch on any device, float32 (B, num_features).

    Raises:
        ValueError: A feature is not finite.
    """
    features = pooled_features(net, move_data_to_device(images, device)).float()
    if not features.isfinite().all():
        raise ValueError(
            "the model computes features that are NaN or infinite: check its weights, mean and std (no std may be 0), "
            "and the images"
        )
    return features


def pooled_features(net: nn.Module, images: ImageBatch) -> Tensor:
    """Compute the pooled features before the classifier of images or native patches, (B, num_features)."""
    if isinstance(net, NaFlexVit) and isinstance(images, dict):
        features = net.forward_features(*(images[name] for name in ("patches", "patch_coord", "patch_valid")))
        return net.forward_head(**features, pre_logits=True)
    return net.forward_head(net.forward_features(images), pre_logits=True)


def run_batches(
    step: Callable[[ImageBatch], Tensor],
    batches: Iterable[tuple[ImageBatch, Any]],
    data: ImageData | None = None,
    split: Split = "val",
) -> Iterator[tuple[Tensor, Any]]:
    """Yield the result of `step` for the images of each batch, on the CPU, and the batch's labels or names.

    If `data` is given, the batches are of its `split`: check labels, and warn at the end of images that could not be
    read.

    Raises:
        ValueError: `data` is given, and there is no batch, or the labels are refused by `Labels.checked`.
    """
    found = False
    for images, others in batches:
        found = True
        if data is not None:
            others = _checked(labels_in(data), others, data.num_classes)
        with torch.inference_mode():
            rows = step(images).cpu()
        yield rows, others
    if data is None:
        return
    if not found:
        raise ValueError(f"none of the images of {split} could be read: relvit check-data says why")
    if unreadable := data.unreadable.get(split):
        path, reason = next(iter(unreadable.items()))
        first = f"The first is {visible(path)}: {reason}"
        warnings.warn(f"{unreadable_sentence(split, len(unreadable))} {first}", stacklevel=2)
