"""The image classifier as a LightningModule: arguments, training step and hooks; `base_classifier.py` evaluates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, SumMetric

from relvit.app.data.batches import ImageBatch
from relvit.app.data.mixup import BatchMix
from relvit.app.models import build_model
from relvit.app.training.base_classifier import BaseClassifier
from relvit.app.training.checkpoints.description import describe as describe_training
from relvit.app.training.checkpoints.exact_resume import Progress
from relvit.app.training.checkpoints.file import AVERAGE_KEY, TIMM_KEY, timm_weights
from relvit.app.training.checkpoints.pretrained import Pretrained, architecture_to_build, load_pretrained
from relvit.app.training.checkpoints.upgrades import KEY, upgrade
from relvit.app.training.classifier_checks import check_arguments, check_images, plain_arguments
from relvit.app.training.compilation import compile_in_place
from relvit.app.training.labels import Labels, labels_of
from relvit.app.training.lightning_options import check_epsilon, check_trainer
from relvit.app.training.metrics import METRICS_KEY, count_batch, current_lr
from relvit.app.training.optim.additional_losses import check_losses, loss_weight, training_losses
from relvit.app.training.optim.distillation import Distill, Teacher, build_teacher, distillation_loss
from relvit.app.training.optim.ema import WeightAverage
from relvit.app.training.optim.freeze import Backbone
from relvit.app.training.optim.gradients import FiniteCheck, NonFinite, average_accumulated, recompute_blocks
from relvit.app.training.optim.loss import ClassificationLoss, Loss
from relvit.app.training.optim.optimizer import make_optimizer
from relvit.app.training.optim.schedule import DEFAULT, Plan, Schedule, describe, make_plan, schedule_name, schedule_of
from relvit.app.training.training_output import training_output
from relvit.app.utils.exceptions import attribute_of
from relvit.app.utils.number_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    ShareBelowOne,
    check_ranges,
)
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.seeding import run_seed, seed_all
from relvit.app.utils.shown_text import without_secrets
from relvit.models import TransferReport, param_groups


class ImageClassifier(BaseClassifier):
    """Trains, evaluates and predicts with any timm model and optimiser, by a learning rate for each step.

    Args:
        model: The name of a relvit or timm model. None: the model of `pretrained`, with its `model_kwargs` and
            `retrofit` unless they are given; without `pretrained`, relvit_small.
        num_classes: The number of classes.
        in_chans: The number of channels of the images.
        img_size: The image size that the model is built for; evaluation may use other sizes.
        class_names: The names of the classes in order. None: the names that the data module has, if it has any.
        model_kwargs: Further arguments of the model, checked against its signature.
        retrofit: The arguments of `relvit.retrofit`, which gives a timm model relative positions; {} takes its
            defaults. None leaves the model unchanged.
        pretrained: The weights that a new training starts from: a relvit checkpoint, a model of timm with its tag, a
            file or folder of weights, see `Pretrained`. The weights are adapted to these classes and this image size,
            see `transfer_weights`. With a checkpoint, they are not loaded.
        opt: The name of an optimiser of timm (adamw, lamb, lion, muon, sgd ...).
        opt_kwargs: Further arguments of the optimiser, such as betas, momentum, eps.
        lr: The peak learning rate.
        lr_base_batch: The number of images per optimiser step, over all devices and accumulated batches, that `lr` is
            meant for: the learning rate (not `min_lr`) grows in proportion to that number. None uses `lr` itself.
        layer_decay: The factor on the learning rate from each layer to the layer before it, down to the stem; None: 1.
        position_lr_scale: The number by which the learning rate of the parameters of relative positions is multiplied.
            New tables after a `retrofit` need a higher rate than pretrained weights (10 in the recipe `retrofit`).
        weight_decay: The weight decay of the optimiser; biases, norms and position tables have none.
        warmup_epochs: The length of the linear warm-up in epochs; fractions are allowed.
        min_lr: The learning rate at the end of the training.
        schedule: A function with the arguments of `relvit.app.training.warmup_cosine`, by whose result the learning
            rate is multiplied at each optimiser step; or its name as 'module.function', which a checkpoint records.
        loss: The training loss: 'ce' (cross-entropy, as in evaluation), 'bce' (binary cross-entropy of each class) or,
            with `multi_label`, 'asl' (the asymmetric loss, which counts the many absent classes less).
        label_smoothing: The part of a label, not of a soft target, that all classes share (Szegedy et al. 2016).
        bce_threshold: With 'bce', targets above this number count as 1, all others as 0. None changes no targets.
        class_weights: The weight of each class in the training loss, in the order of the classes.
        mixup: The parameter of mixup's Beta distribution; 0 turns mixup off.
        cutmix: The parameter of cutmix's Beta distribution; 0 turns cutmix off.
        mix_prob: The probability that a batch is mixed.
        mix_switch_prob: The probability that a mixed batch uses cutmix, if both mixup and cutmix are on.
        ema_decay: The decay of a moving average of the weights, which evaluation uses. None keeps no average.
        ema_warmup: Whether the decay of the average grows from 0 to `ema_decay`, as 1 - step^(-2/3).
        teacher: A trained classifier of the same classes for distillation, named as `pretrained` is (not plain
            weights). The output of the distillation token, or else the only output, learns from the teacher.
        distill: 'hard' (the target is the teacher's class) or 'soft' (the target is the teacher's probabilities).
        distill_weight: The weight of the teacher's part of the loss; DeiT has 0.5 for 'hard', 0.1 for 'soft'.
        distill_temperature: The temperature of the probabilities, with 'soft'.
        ponder_weight: The weight in the training loss of the ponder cost, which grows with the number of steps that are
            computed for each patch; for models with adaptive halting.
        ponder_warmup_epochs: The length of the linear rise of `ponder_weight` in epochs.
        freeze_epochs: The number of first epochs that train only the classifier, with the backbone in evaluation mode.
        nonfinite: If a loss or gradient is not finite on any device, 'stop' before the optimiser step, or 'skip' it.
        compile: Whether the model is compiled by `torch.compile`, or the name of the backend that compiles it.
        grad_checkpointing: Whether backward computes each block again instead of keeping its activations (timm's
            `set_grad_checkpointing`): less memory, but a training step takes about a third longer.
        channels_last: Whether images and convolutions use the memory format channels_last, which GPUs prefer.
        multi_label: Whether an image has any number of classes, each with a probability of its own (sigmoid); the loss
            'ce' then means 'bce'. Each validation chooses, for each class, the threshold with the highest F1.

    Raises:
        ValueError: A name is unknown, a class has no name, a number is out of its range, or an option has no effect.
        FileNotFoundError: There is no file at `pretrained`, and no `model`.
    """

    def __init__(
        self,
        model: str | None = None,
        num_classes: PositiveInt = 1000,
        in_chans: PositiveInt = 3,
        img_size: int | tuple[int, int] | None = None,
        class_names: list[str] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        retrofit: dict[str, Any] | None = None,
        pretrained: str | None = None,
        opt: str = "adamw",
        opt_kwargs: dict[str, Any] | None = None,
        lr: NonNegativeFloat = 1e-3,
        lr_base_batch: PositiveInt | None = None,
        layer_decay: PositiveShare | None = None,
        position_lr_scale: PositiveFloat = 1.0,
        weight_decay: NonNegativeFloat = 0.05,
        warmup_epochs: NonNegativeFloat = 5.0,
        min_lr: NonNegativeFloat = 1e-5,
        schedule: str | Schedule = DEFAULT,
        loss: Loss = "ce",
        label_smoothing: ShareBelowOne = 0.1,
        bce_threshold: ShareBelowOne | None = None,
        class_weights: list[PositiveFloat] | None = None,
        mixup: NonNegativeFloat = 0.0,
        cutmix: NonNegativeFloat = 0.0,
        mix_prob: Share = 1.0,
        mix_switch_prob: Share = 0.5,
        ema_decay: ShareBelowOne | None = None,
        ema_warmup: bool = True,
        teacher: str | None = None,
        distill: Distill = "hard",
        distill_weight: PositiveShare = 0.5,
        distill_temperature: PositiveFloat = 3.0,
        ponder_weight: NonNegativeFloat = 0.01,
        ponder_warmup_epochs: NonNegativeFloat = 5.0,
        freeze_epochs: NonNegativeInt = 0,
        nonfinite: NonFinite = "stop",
        compile: bool | str = False,
        grad_checkpointing: bool = False,
        channels_last: bool = False,
        multi_label: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ARGUMENTS}
        super().__init__()
        # Lightning also finds arguments of a subclass, which may have the same names, but other values.
        self.save_hyperparameters()
        arguments = plain_arguments(self.hparams | given)
        self.hparams.clear()
        self.save_hyperparameters(arguments)
        pretrained, teacher = self.hparams.pretrained, self.hparams.teacher  # A path is a text by now.
        check_ranges(ImageClassifier.__init__, self.hparams)
        check_arguments(self.hparams)
        # Loading the weights sets `self.pretrained` to None, so that a second training does not load them again.
        self.pretrained = None if pretrained is None else Pretrained(pretrained)
        # The file of pretrained weights may name the model, but it may get lost, so checkpoints name the model, too.
        built = architecture_to_build(model, model_kwargs, retrofit, self.pretrained)
        # Checkpoints and loggers record the addresses of weights, so remove passwords and signatures.
        public = {"pretrained": without_secrets(pretrained), "teacher": without_secrets(teacher)}
        self.save_hyperparameters(built._asdict() | public | {"schedule": schedule_name(schedule)})
        self._teacher_source: str | None = teacher
        # Import a schedule that is given by name only when a training starts: evaluation does not need it, and the name
        # may come from a checkpoint of anybody.
        self.schedule: str | Schedule = schedule if isinstance(schedule, str) else schedule_of(schedule)
        sizes = num_classes, in_chans, img_size
        self.net: nn.Module = build_model(built.model, *sizes, built.model_kwargs, built.retrofit)
        # Evaluation divides logits by this number, which a calibrated checkpoint sets. A training ignores a
        # checkpoint's temperature, because it was fitted to weights that the training changes.
        self.temperature: float = 1.0
        # Call `param_groups` only for its check: it refuses `position_lr_scale` for models without relative positions.
        param_groups(self.net, lr, position_lr_scale)
        check_losses(self.hparams, ARGUMENTS, self.net, MODEL_LOSSES)
        if channels_last:
            self.net.to(memory_format=torch.channels_last)
        options = (num_classes, loss, label_smoothing, bce_threshold, class_weights, multi_label)
        self.loss: ClassificationLoss = ClassificationLoss(*options)
        mixing = (num_classes, mixup, cutmix, mix_prob, mix_switch_prob, label_smoothing)
        self.mixing: BatchMix | None = BatchMix(*mixing) if mixup or cutmix else None
        self.backbone: Backbone | None = Backbone(self.net) if freeze_epochs else None
        self.average: WeightAverage | None = None
        self.teacher: Teacher | None = None
        self.finite: FiniteCheck = FiniteCheck(nonfinite)
        self.plan: Plan | None = None
        # Checkpoints record these options of the training, in plain types, beside the hyperparameters.
        self.fit_options: dict[str, Any] = {}
        self.transfer: TransferReport | None = None
        # `FindLearningRate` sets this to a list of the learning rate and the loss of each batch; otherwise it is None.
        self.range_test: list[tuple[float, float]] | None = None
        self._restored_average: dict[str, Tensor] | None = None
        # All devices skip the same steps, so their counts must not be added up.
        skipped = {"skipped_steps": SumMetric(sync_on_compute=False)} if nonfinite == "skip" else {}
        costs = {f"{name}_cost": MeanMetric() for name in training_losses(self.net)}
        labels = labels_of([0.5] * num_classes if multi_label else None)
        self.create_metrics(labels, num_classes, self.mixing is not None, skipped | costs)

    def forward(self, images: ImageBatch) -> Tensor:
        """Compute the logits (B, num_classes) of images (B, in_chans, height, width), or of a native batch.

        Evaluation mode uses the averaged weights if the training keeps an average, and divides the logits by the
        temperature if the checkpoint is calibrated (`relvit.app.evaluation.calibrate`).
        """
        if self.hparams.channels_last and isinstance(images, Tensor):
            images = images.contiguous(memory_format=torch.channels_last)
        logits = (self.net if self.training else self.evaluated)(images)
        return logits if self.training or self.temperature == 1 else logits / self.temperature

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of images and labels, see `ClassificationLoss`."""
        images, targets = self.labelled(batch, training=True)
        # With this seed, a resumed training draws the same random numbers for mixing, dropout and stochastic depth as a
        # training without a break.
        seed_all(run_seed(), self.current_epoch, batch_idx, self.global_rank)
        if self.mixing is not None:
            images, targets = self.mixing(images, targets)
        logits, distilled, further = training_output(self(images))
        loss = self.loss(logits, targets)
        if self.teacher is not None:
            options = (self.hparams.distill, self.hparams.distill_weight, self.hparams.distill_temperature)
            loss = distillation_loss(loss, distilled, self.teacher(images), *options)
        for name, added in further.items():
            loss = loss + loss_weight(self.hparams, self.trainer, name) * added
            self.step_metrics[f"{name}_cost"].update(added.detach(), weight=len(logits))
        if self.range_test is not None:
            self.range_test.append((current_lr(self.trainer), float(loss.detach())))
        if targets.is_floating_point():
            targets = targets.argmax(-1)
        count_batch(self.train_metrics, loss.where(loss.isfinite(), torch.nan), logits, targets)
        self.log_running()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        """Note the loss for the check before the optimiser step, also the loss of a subclass's `training_step`."""
        self.finite.note(loss)

    def configure_callbacks(self) -> list[Callback]:
        """Refuse a trainer that does not fit the classifier, and add no callbacks; Lightning calls this hook first."""
        check_trainer(self.trainer, self.hparams.ema_decay)
        return []

    def setup(self, stage: str) -> None:
        """Check the data, compile, load the teacher, and take class weights from the data."""
        data = self.trainer.datamodule
        check_images(self.net, data, self.hparams, stage)
        compile_in_place(self.net, self.hparams.compile, data)
        if stage != "fit":
            return
        if self.backbone is not None:
            self.backbone.set_frozen(False)  # An error may have ended an earlier training in a frozen epoch.
        if self.hparams.grad_checkpointing:
            recompute_blocks(self.net)
        self.temperature = 1.0
        self.progress: Progress = Progress()
        if self.hparams.teacher is not None and self.teacher is None:
            self.teacher = build_teacher({**self.hparams, "teacher": self._teacher_source}, data)
            if hasattr(self.net, "set_distilled_training"):
                self.net.set_distilled_training(True)
        if training_losses(self.net):
            self.net.set_training_losses(True)
        self.loss.balance(attribute_of(data, "class_weights"))

    def configure_optimizers(self) -> dict[str, Any]:
        self._load_pretrained()
        hparams = self.hparams
        self.plan = make_plan(self.trainer, hparams.lr, hparams.lr_base_batch, hparams.warmup_epochs)
        self.progress.check_layout(self.trainer)
        self.progress.restore_loaders(self.trainer)
        rates = (self.plan.lr, hparams.weight_decay, hparams.layer_decay)
        optimizer = make_optimizer(self.net, hparams.opt, *rates, hparams.opt_kwargs, hparams.position_lr_scale)
        check_epsilon(self.trainer, optimizer)
        scheduler = self.plan.scheduler(optimizer, hparams.min_lr, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _load_pretrained(self) -> None:
        """Load pretrained weights, unless an earlier start or a checkpoint, which Lightning loads first, gave some."""
        if self.pretrained is not None:
            self.transfer = load_pretrained(self.net, self.pretrained, self.hparams, self.trainer.datamodule)
            self.pretrained = None

    on_validation_start = _load_pretrained
    on_test_start = _load_pretrained
    on_predict_start = _load_pretrained

    def on_fit_start(self) -> None:
        """Start the average with the weights on their device, or restore it from a checkpoint."""
        # The `configure_optimizers` of a subclass may not have loaded the weights.
        self._load_pretrained()
        decay, warmup = self.hparams.ema_decay, self.hparams.ema_warmup
        self.average = None if decay is None else WeightAverage(self.net, decay, warmup)
        if self.average is not None:
            if self._restored_average is not None:
                self.average.load(self._restored_average)
            compile_in_place(self.average.net, self.hparams.compile, self.trainer.datamodule)
        self._restored_average = None

    def on_train_start(self) -> None:
        """Resume exactly where the checkpoint was, and report the plan, which an optimiser of a subclass lacks."""
        self.progress.resume(self)
        self.finite.begin(self.net)
        if self.plan is not None and self.range_test is None:
            names = ("lr", "lr_base_batch", "freeze_epochs", "position_lr_scale")
            rank_zero_print(describe(self.plan, self.trainer, *(self.hparams[name] for name in names)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Freeze or unfreeze the backbone."""
        if self.backbone is not None:
            # The number of the epoch alone decides, so that a resumed training freezes the same epochs.
            frozen = self.current_epoch < self.hparams.freeze_epochs
            self.backbone.set_frozen(frozen, without_gradients=self.trainer.world_size == 1)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Average the gradients over accumulated batches, and stop at, or skip, gradients that are not finite."""
        if self.backbone is not None and self.backbone.frozen:
            self.backbone.drop_gradients()
        average_accumulated(self.trainer, self.net.parameters())
        if self.range_test is not None:
            return
        norm, finite = self.finite.before_step(self.trainer, self.net.parameters())
        if finite:
            self.step_metrics["grad_norm"].update(norm)
        if "skipped_steps" in self.step_metrics:
            self.step_metrics["skipped_steps"].update(float(not finite))
        self.log("grad_norm", norm, on_step=True, on_epoch=False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step the optimiser and the average; Lightning skips this hook for batches that only accumulate."""
        super().optimizer_step(*args, **kwargs)
        if self.average is not None:
            self.average.update(self.net, self.global_step + 1)
        self.keep_step_metrics()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self._is_fitting and not self.trainer.sanity_checking:
            self.progress.note_validation(self.trainer)

    def on_train_epoch_end(self) -> None:
        # Lightning calls this hook before callbacks save checkpoints, so these checkpoints count the epoch as complete.
        super().on_train_epoch_end()
        self.progress.note_epoch(self.trainer)

    def on_train_end(self) -> None:
        if self.backbone is not None:
            self.backbone.set_frozen(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add a description, the averaged weights and the progress; 'state_dict' holds the raw weights."""
        checkpoint[KEY] = describe_training(self, {name: self.hparams[name] for name in ARGUMENTS})
        if self._is_fitting:
            point = self.progress.save(self.trainer, checkpoint)
            checkpoint[METRICS_KEY] = self.metrics_to_save(within_epoch=point.batch > 0)
        if self.average is not None:
            checkpoint[AVERAGE_KEY] = {f"net.{name}": value for name, value in self.average.net.state_dict().items()}
        checkpoint[TIMM_KEY] = timm_weights(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore raw and averaged weights to resume a training; evaluation loads the averaged ones alone."""
        self.pretrained = None
        if KEY in checkpoint:
            upgrade(checkpoint, "the checkpoint")
        averaged, description = checkpoint.get(AVERAGE_KEY), checkpoint.get(KEY, {})
        self.labels: Labels = self.labels.restored(description.get("thresholds"))
        if not self._is_fitting:
            self.average = None
            self.temperature = description.get("temperature", 1.0)
            checkpoint["state_dict"] = checkpoint["state_dict"] | (averaged or {})
            return
        if averaged is not None:
            self._restored_average = {name.removeprefix("net."): value for name, value in averaged.items()}
        if self.progress.load(checkpoint, self.hparams):
            self.restore_metrics(checkpoint[METRICS_KEY])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ImageClassifier:
        """Also move the average and the teacher, which are not submodules, to another device or dtype."""
        super()._apply(fn, recurse)
        for companion in (self.average, self.teacher):
            if companion is not None:
                companion.net._apply(fn)
        return self


# A subclass may have further arguments.
ARGUMENTS = inspect.signature(ImageClassifier).parameters
# `MODEL_LOSSES` maps each loss that only some models return in training to a description of these models.
MODEL_LOSSES = {"ponder": "a model that halts: relvit_universal_* with model_kwargs.halting act"}
