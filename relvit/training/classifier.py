"""The Lightning module that trains, evaluates and predicts with any timm or relvit classifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection

from relvit.data.loading.sampler import training_position
from relvit.data.mixup import BatchMix
from relvit.models import build_model, check_image_size
from relvit.models.weights.transfer import TransferReport, transfer_weights
from relvit.training.arguments import check_arguments
from relvit.training.callbacks.finite import FiniteCheck, NonFinite
from relvit.training.checkpoints.file import AVERAGE_KEY, TIMM_KEY, timm_weights
from relvit.training.checkpoints.pretrained import Pretrained, architecture_to_build, normalisation_note
from relvit.training.checkpoints.resume import (
    POINT_KEY,
    ResumePoint,
    States,
    check_layout,
    copy_states,
    gather_states,
    go_on,
    restore_states,
    set_counters,
    states_of_process,
)
from relvit.training.class_metrics import count_batch
from relvit.training.epoch_metrics import EpochMetrics
from relvit.training.optim.accumulation import average_gradients
from relvit.training.optim.distillation import Teacher, distillation_loss
from relvit.training.optim.ema import WeightAverage
from relvit.training.optim.freeze import Backbone
from relvit.training.optim.loss import ClassificationLoss
from relvit.training.optim.optimizer import make_optimizer
from relvit.training.optim.schedule import Plan, describe, make_plan, set_rates, warmup_cosine
from relvit.training.optim.sharding import FullySharded, check_sharding, check_strategy, is_sharded, load_whole, whole
from relvit.utils.progress import rank_zero_print
from relvit.utils.seeding import run_seed, seed_all

# Where a checkpoint keeps the metrics of an epoch that is under way.
METRICS_KEY = "train_metrics"


class ImageClassifier(EpochMetrics):
    """Image classification with any timm model and optimiser, and a warm-up + cosine learning rate per optimiser step.

    Args:
        model: The name of a relvit or timm model. None: the model of `pretrained`, with its `model_kwargs` and
            `retrofit` where these are not given; without `pretrained` relvit_small.
        num_classes: The number of classes.
        in_chans: The number of channels of the images.
        img_size: The image size that the model is built for; evaluation may use others.
        class_names: The names of the classes in order.
        model_kwargs: Further arguments of the model, checked against its signature.
        retrofit: The arguments of `relvit.retrofit`, which gives a timm model relative positions. {} takes its
            defaults, None leaves the model as it is.
        pretrained: The weights that a training starts from: a relvit checkpoint, a model of timm with its tag, a file
            or folder of weights, see `Pretrained`. They are loaded when a new training starts, into the model with
            these classes and this image size, see `transfer_weights`; a resumed training or an evaluation loads its
            checkpoint alone.
        opt: The name of an optimiser of timm (adamw, lamb, lion, muon, sgd ...).
        opt_kwargs: Further arguments of the optimiser, such as betas, momentum, eps.
        lr: The peak learning rate.
        lr_base_batch: The number of images per optimiser step that `lr` is meant for: the learning rate grows in
            proportion to the batch over all devices and accumulated steps (`min_lr` does not). None uses `lr` itself.
        layer_decay: The factor on the learning rate from each layer to the one below it, from the classifier down to
            the stem. None gives all layers the same learning rate.
        weight_decay: The weight decay of the optimiser; biases, norms and position tables have none.
        warmup_epochs: The length of the linear warm-up in epochs; fractions are allowed.
        min_lr: The learning rate at the end.
        loss: The training loss: 'ce' (cross-entropy) or 'bce' (binary cross-entropy, class by class); evaluation
            reports cross-entropy.
        label_smoothing: The share of the target that is spread over all classes (Szegedy et al. 2016, arXiv
            1512.00567).
        bce_threshold: With 'bce', targets above this count as 1 and others as 0. None leaves the targets as they are.
        class_weights: The weight of each class in the training loss, in the order of the classes.
        mixup: The parameter of mixup's Beta distribution; 0 turns mixup off.
        cutmix: The parameter of cutmix's Beta distribution; 0 turns cutmix off.
        mix_prob: The probability that a batch is mixed at all.
        mix_switch_prob: The probability of cutmix where mixup is on as well.
        ema_decay: The decay of a moving average of the weights, which evaluation then uses and checkpoints hold as
            well. None keeps no average.
        ema_warmup: Whether the decay of the average grows from 0, as 1 - step^(-2/3).
        teacher: A trained classifier of the same classes for distillation, named as `pretrained` is (but not plain
            weights). In models with a distillation token, the output of that token learns from the teacher; in others
            the only output does. See `distillation_loss`.
        distill: 'hard' (the target is the teacher's class) or 'soft' (the target is the teacher's probabilities).
        distill_weight: The weight of the teacher's part of the loss; DeiT has 0.5 for 'hard', 0.1 for 'soft'.
        distill_temperature: The temperature of the probabilities, with 'soft'.
        freeze_epochs: The number of epochs in which the classifier alone is trained, all else being in evaluation mode.
        nonfinite: What to do where a loss or gradient is not finite, on any device: 'stop' before the optimiser step,
            or 'skip' that step and count it.
        compile: Whether the model is compiled by `torch.compile`, or the name of the backend that compiles it.
        channels_last: Whether images and convolutions use the memory format that GPUs prefer.

    Raises:
        ValueError: an unknown name, class names that do not match `num_classes`, numbers out of range.
        FileNotFoundError: without `model`, no file at `pretrained`.
    """

    def __init__(
        self,
        model: str | None = None,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        class_names: list[str] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        retrofit: dict[str, Any] | None = None,
        pretrained: str | None = None,
        opt: str = "adamw",
        opt_kwargs: dict[str, Any] | None = None,
        lr: float = 1e-3,
        lr_base_batch: int | None = None,
        layer_decay: float | None = None,
        weight_decay: float = 0.05,
        warmup_epochs: float = 5.0,
        min_lr: float = 1e-5,
        loss: Literal["ce", "bce"] = "ce",
        label_smoothing: float = 0.1,
        bce_threshold: float | None = None,
        class_weights: list[float] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_prob: float = 1.0,
        mix_switch_prob: float = 0.5,
        ema_decay: float | None = None,
        ema_warmup: bool = True,
        teacher: str | None = None,
        distill: Literal["hard", "soft"] = "hard",
        distill_weight: float = 0.5,
        distill_temperature: float = 3.0,
        freeze_epochs: int = 0,
        nonfinite: NonFinite = "stop",
        compile: bool | str = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_arguments(self.hparams)
        # What a new training starts from; None once the weights are loaded.
        self.pretrained = None if pretrained is None else Pretrained(pretrained)
        # A checkpoint has to know its model without the file that this training starts from.
        built = architecture_to_build(model, model_kwargs, retrofit, self.pretrained)
        self.save_hyperparameters(built._asdict())
        self.net = build_model(built.model, num_classes, in_chans, img_size, built.model_kwargs, built.retrofit)
        self.transfer: TransferReport | None = None
        if channels_last:
            self.net.to(memory_format=torch.channels_last)
        self.loss = ClassificationLoss(num_classes, loss, label_smoothing, bce_threshold, class_weights)
        self.mixing: BatchMix | None = None
        if mixup or cutmix:
            self.mixing = BatchMix(num_classes, mixup, cutmix, mix_prob, mix_switch_prob, label_smoothing)
        self.backbone = Backbone(self.net) if freeze_epochs else None
        self.average: WeightAverage | None = None
        self.teacher: Teacher | None = None
        self.finite = FiniteCheck(nonfinite)
        self.plan: Plan | None = None
        # While learning rates are tried out, which ends in an exploding loss.
        self.searching = False
        self._restored_average: dict[str, Tensor] | None = None
        self._restored: ResumePoint | None = None
        self._validated_at: tuple[int, int] | None = None
        self._ended_epoch: int | None = None
        # Of the epoch up to the last optimiser step, which is where a checkpoint goes on.
        self._metrics_at_step: States = {}
        self.create_metrics(num_classes, mixed=self.mixing is not None, skipped_steps=nonfinite == "skip")

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) -> logits (B, num_classes).

        In evaluation mode by the averaged weights where a training keeps an average, else by those of `net`.
        """
        if self.hparams.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        net = self.net if self.training or self.average is None else self.average.net
        return net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of images and labels (B,) or target distributions (B, num_classes)."""
        images, targets = batch
        # All that is drawn from here on: mixing, dropout, stochastic depth.
        seed_all(run_seed(), self.current_epoch, batch_idx, self.global_rank)
        if self.mixing is not None:
            images, targets = self.mixing(images, targets)
        outputs = self(images)
        # With a distillation token: what the class token says, and what that one says.
        logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        loss = self.loss(logits, targets)
        if self.teacher is not None:
            options = (self.hparams.distill, self.hparams.distill_weight, self.hparams.distill_temperature)
            loss = distillation_loss(loss, distilled, self.teacher(images), *options)
        self.finite.note(loss)
        labels = targets if targets.ndim == 1 else targets.argmax(-1)
        count_batch(self.train_metrics, loss, logits, labels)
        self.log_running()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> dict[str, Any]:
        """Names of the images, (B, num_classes) probabilities. Of an empty batch, see `ShareLoader`, there are none."""
        images, names = batch
        if not len(names):
            self._keep_step(images)
            return {"names": [], "probabilities": images.new_empty(0, self.hparams.num_classes)}
        return {"names": list(names), "probabilities": self(images).float().softmax(-1)}

    def setup(self, stage: str) -> None:
        """Compile before the first use, so that a classifier which is only loaded takes no time for it.

        And see whether the model takes the data's images, find the teacher, and take the class weights of data that
        balance the loss.
        """
        check_strategy(self.trainer.strategy)
        if isinstance(self.trainer.strategy, FullySharded):
            check_sharding(self.trainer, self.hparams, self.net)
        size = getattr(self.trainer.datamodule, "img_size", None)
        # After a training in shards that has been seen.
        if size is not None and not is_sharded(self.net):
            check_image_size(self.net, size, self.hparams.in_chans, self.hparams.img_size)
        if self.net._compiled_call_impl is None:
            self._compile(self.net)
        if stage == "fit" and self.hparams.teacher is not None and self.teacher is None:
            self._hire_teacher()
        weights = getattr(self.trainer.datamodule, "class_weights", None) if stage == "fit" else None
        if weights is not None:
            if self.hparams.class_weights is not None:
                raise ValueError("the data balances the loss (balance='loss'): leave out class_weights")
            self.loss.weights = weights.to(self.device)

    def configure_model(self) -> None:
        """Under `FullySharded`, leave this process its shards."""
        if self._trainer is None:
            return
        strategy, fits = self.trainer.strategy, self.trainer.state.fn == TrainerFn.FITTING
        in_shards = isinstance(strategy, FullySharded)
        if is_sharded(self.net) and (fits or not in_shards):
            raise ValueError("this classifier was divided among processes by an earlier training: load its checkpoint")
        if is_sharded(self.net) or not in_shards:
            return
        if fits and self.hparams.ema_decay is not None:
            self.average = WeightAverage(self.net, self.hparams.ema_decay, self.hparams.ema_warmup)
            strategy.shard(self.average.net)
        strategy.shard(self.net)
        if self.backbone is not None:
            self.backbone = Backbone(self.net)

    def configure_optimizers(self) -> dict[str, Any]:
        # The first hook of a fit by which a checkpoint, if there is one, has been restored.
        if self.pretrained is not None:
            self._load_pretrained()
        hparams = self.hparams
        self.plan = make_plan(self.trainer, hparams.lr, hparams.lr_base_batch, hparams.warmup_epochs)
        if self._restored is not None:
            check_layout(self.trainer, self._restored)
        lr = self.plan.lr
        if hparams.min_lr > lr:
            raise ValueError(
                f"min_lr {hparams.min_lr:g} exceeds {lr:g}, the learning rate for {self.plan.batch} images"
            )
        optimizer = make_optimizer(
            self.net, hparams.opt, lr, hparams.weight_decay, hparams.layer_decay, hparams.opt_kwargs
        )
        floor = hparams.min_lr / lr if lr else 0.0
        factor = partial(warmup_cosine, total=self.plan.steps, warmup=self.plan.warmup, floor=floor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    def on_fit_start(self) -> None:
        """Start the average where the weights are now: on their device, restored from a checkpoint or fresh."""
        if is_sharded(self.net):
            # A copy cannot be made of shards: it is there already.
            if self.average is not None:
                self.average.net.load_state_dict(self.net.state_dict())
        else:
            decay, warmup = self.hparams.ema_decay, self.hparams.ema_warmup
            self.average = None if decay is None else WeightAverage(self.net, decay, warmup)
        if self.average is not None:
            if self._restored_average is not None:
                self.average.load(self._restored_average)
            self._compile(self.average.net)
        self._restored_average = None

    def on_train_start(self) -> None:
        """Go on exactly where a checkpoint was, and say what the devices make of batch and learning rate."""
        if self._restored is not None:
            go_on(self.trainer, self._restored)
            set_rates(self.lr_schedulers())
            self._restored = None
        if self.searching:
            return
        lr, base_batch = self.hparams.lr, self.hparams.lr_base_batch
        rank_zero_print(describe(self.plan, self.trainer, lr, base_batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Freeze or unfreeze by the number of the epoch alone, so that a resumed run does likewise."""
        if self.backbone is None or self.backbone.frozen == (self.current_epoch < self.hparams.freeze_epochs):
            return
        if self.backbone.frozen:
            self.backbone.unfreeze()
        else:
            self.backbone.freeze(without_gradients=self.trainer.world_size == 1)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Only finite gradients, none of what is frozen, and the mean of the batches that were accumulated."""
        if self.backbone is not None and self.backbone.frozen:
            self.backbone.drop_gradients()
        average_gradients(self.trainer, self.net.parameters())
        if self.searching:
            return
        norm, fine = self.finite.before_step(self.trainer, self.net.parameters())
        if fine:
            self.step_metrics["grad_norm"].update(norm)
        if "skipped_steps" in self.step_metrics:
            self.step_metrics["skipped_steps"].update(float(not fine))
        self.log("grad_norm", norm, on_step=True, on_epoch=False)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """One step of the optimiser, and of the average. Not called for batches that only accumulate."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.average is not None:
            self.average.update(self.net, self.global_step + 1)
        self._metrics_at_step = copy_states(self.train_metrics) | copy_states(self.step_metrics)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self._validated_at = training_position(self.trainer)

    def on_train_epoch_end(self) -> None:
        """After all other callbacks, and before those that save."""
        super().on_train_epoch_end()
        self._ended_epoch = self.current_epoch

    def on_train_end(self) -> None:
        if self.backbone is not None and self.backbone.frozen:
            self.backbone.unfreeze()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raw weights stay in 'state_dict', where resuming finds them."""
        if self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING:
            point = ResumePoint.of(self.trainer, self._validated_at, self._ended_epoch)
            checkpoint[POINT_KEY] = point._asdict()
            checkpoint[METRICS_KEY] = gather_states(self._metrics_at_step if point.batch else {})
        if self.average is not None:
            weights = whole(self.average.net.state_dict(), keep=self.global_rank == 0)
            checkpoint[AVERAGE_KEY] = {f"net.{name}": value for name, value in weights.items()}
        checkpoint[TIMM_KEY] = timm_weights(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A training goes on with both kinds of weights; everything else uses the averaged ones."""
        self.pretrained = None
        averaged = checkpoint.get(AVERAGE_KEY)
        if self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._restore_position(checkpoint)
            if averaged is not None:
                self._restored_average = {name.removeprefix("net."): value for name, value in averaged.items()}
        else:
            self.average = None
            checkpoint["state_dict"] = checkpoint["state_dict"] | (averaged or {})

    def _restore_position(self, checkpoint: dict[str, Any]) -> None:
        """Set the counters that Lightning is about to read, and put back what it knows nothing of."""
        point = ResumePoint.read(checkpoint)
        if point is None:
            return
        set_counters(checkpoint, point)
        self._restored = point
        self._validated_at = (point.epoch, point.batch) if point.validated else None
        self._ended_epoch = point.epoch - 1
        self.train_metrics.reset()
        self.step_metrics.reset()
        place = self.global_rank, self.trainer.world_size
        self._metrics_at_step = states_of_process(checkpoint[METRICS_KEY], *place)
        for metrics in (self.train_metrics, self.step_metrics):
            restore_states(metrics, self._metrics_at_step)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ImageClassifier:
        """Take the average and the teacher along to another device or dtype."""
        super()._apply(fn, recurse)
        for companion in (self.average, self.teacher):
            if companion is not None:
                companion.net._apply(fn)
        return self

    def _compile(self, net: nn.Module) -> None:
        """Compile in place, which leaves the names in the state dict as they are."""
        if self.hparams.compile:
            net.compile(backend="inductor" if self.hparams.compile is True else self.hparams.compile)

    def _hire_teacher(self) -> None:
        hparams, data = self.hparams, self.trainer.datamodule
        normalisation = (getattr(data, name, None) for name in ("mean", "std"))
        self.teacher = Teacher(
            hparams.teacher, hparams.num_classes, hparams.img_size, hparams.class_names, *normalisation
        )
        if hasattr(self.net, "set_distilled_training"):
            self.net.set_distilled_training(True)

    def _load_pretrained(self) -> None:
        weights, net = self.pretrained.weights(), self.net
        if is_sharded(self.net):
            # They are fitted into whole tensors alone.
            built = (self.hparams[name] for name in ("model", "num_classes", "in_chans", "img_size"))
            net = build_model(*built, self.hparams.model_kwargs, self.hparams.retrofit)
            net.load_state_dict(whole(self.net.state_dict()))
        self.transfer = transfer_weights(net, weights, self.hparams.class_names)
        if net is not self.net:
            load_whole(self.net, net.state_dict())
        self.pretrained = None
        rank_zero_print(f"pretrained: {self.transfer}")
        if note := normalisation_note(weights, self.trainer.datamodule):
            rank_zero_print(note)

    def _evaluate(self, metrics: MetricCollection, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        if len(labels):
            logits = self(images)
            count_batch(metrics, F.cross_entropy(logits.float(), labels), logits, labels)
        else:
            # This process has fewer batches than others, with which it must keep step.
            self._keep_step(images)

    def _keep_step(self, images: Tensor) -> None:
        """Of an empty batch nothing is to be known, but other processes may wait for this one's shards."""
        if is_sharded(self.net):
            self(images.new_zeros(1, *images.shape[1:]))
