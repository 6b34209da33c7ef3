"""Trainings and evaluations in two processes (gloo, on the CPU), to compare with the same in one process."""

import math
from pathlib import Path

import torch
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback
from small_training import HALTING, NoiseImages, Record, SeveralLabels, build, record_steps, train
from torch import nn

from relvit.app.training import AtomicCheckpointIO

STEP = {"opt": "sgd", "lr": 0.1, "warmup_epochs": 0, "label_smoothing": 0.0, "lr_base_batch": 16}
REVERSIBLE = {"reversible": True, "depth": 3}


def fit(module, data=None, **kwargs):
    """Train for two epochs on 16 images in order, with four images per process and step."""
    options = {"max_epochs": 2, "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    options |= {"plugins": [AtomicCheckpointIO()]}
    return train(module, data or NoiseImages(16, in_order=True), **options | kwargs)


def content(path):
    return torch.load(path, weights_only=True)


def alone(**options):
    """Train as `fit` does, in one process with twice the batch."""
    module = build(**options)
    record = Record(module)
    data = NoiseImages(16, in_order=True, batch_size=8)
    return record, train(module, data, max_epochs=2)


class Shown(Callback):
    """Record the images that student and teacher get in training, and the teacher's mode for each of them."""

    def __init__(self):
        self.student, self.teacher, self.modes = [], [], []

    def on_train_start(self, trainer, pl_module):
        pl_module.net.register_forward_pre_hook(self.note_student)
        pl_module.teacher.net.register_forward_pre_hook(self.note_teacher)

    def note_student(self, net, args):
        if net.training:
            self.student.append(args[0].clone())

    def note_teacher(self, net, args):
        self.teacher.append(args[0].clone())
        self.modes.append(net.training)


def evaluate(count, multi_label):
    """Validate and test after one step, on a number of images."""
    module, data = build(multi_label=multi_label), (SeveralLabels if multi_label else NoiseImages)(count)
    trainer = fit(module, data=data, max_epochs=1, limit_train_batches=1)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    results = trainer.validate(module, data, verbose=False)[0] | trainer.test(module, data, verbose=False)[0]
    return {"weights": weights, "results": results, "thresholds": module.thresholds}


def steps(folder, name, **options):
    """Return weights and rates of each step, and write a checkpoint at the end."""
    module = build(**STEP, **options)
    record = Record(module)
    fit(module).save_checkpoint(folder / f"{name}.ckpt")
    return {"steps": record.weights, "rates": record.rates}


def distilled(folder, name, **options):
    """Return the weights after each step with a teacher, and the images of student and teacher."""
    module = build(**STEP, teacher=str(folder / "teacher"), **options)
    record, shown = Record(module), Shown()
    fit(module, callbacks=[shown]).save_checkpoint(folder / f"{name}.ckpt")
    found = {"steps": record.weights, "student": shown.student, "teacher": shown.teacher, "modes": shown.modes}
    return found | {"weights of the teacher": module.teacher.net.state_dict()}


def with_batch_norm(ema_decay):
    """After each batch, validate a network whose batch norm statistics differ between the processes.

    The first validation comes after a batch that only accumulates gradients, after which DDP does not copy statistics.
    """
    module = build(ema_decay=ema_decay)
    module.net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(48, 7))
    found, data = [], NoiseImages(17)

    def note(trainer, _):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        found.append((metrics, module(data.images).clone()))

    options = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    fit(module, data=data, max_epochs=1, callbacks=[LambdaCallback(on_validation_end=note)], **options)
    return found


def skipped():
    """Make the loss of the second process NaN at the second of three steps; return the norms and counts of steps."""
    module = build(nonfinite="skip")
    loss, found = module.loss.forward, []

    def spoilt(logits, targets):
        return loss(logits, targets) * (math.nan if (module.global_rank, module.global_step) == (1, 1) else 1)

    module.loss.forward = spoilt
    module.on_train_epoch_end = lambda: found.append(module.step_metrics.compute())
    fit(module, data=NoiseImages(24), max_epochs=1, limit_val_batches=0)
    return {name: float(value) for name, value in found[0].items()}


def order():
    """Return the images of each epoch in the order in which this process trained on them."""
    module, data, seen = build(warmup_epochs=0), NoiseImages(12), []
    record_steps(module, lambda batch, _: seen.append((module.current_epoch, data.indices(batch[0]))))
    fit(module, data=data)
    return seen


def trainings(folder):
    """Run all trainings in this process, and save the results of both processes, in order."""
    folder = Path(folder)
    results = {
        "evaluate": {(count, several): evaluate(count, several) for count in (23, 1) for several in (False, True)},
        "step": steps(folder, "step", ema_decay=0.9),
        "frozen": steps(folder, "frozen", freeze_epochs=1),
        "reversible": steps(folder, "reversible", model_kwargs=REVERSIBLE),
        "halting": steps(folder, "halting", **HALTING),
        "hard": distilled(folder, "hard"),
        "mixed": distilled(folder, "mixed", distill="soft", distill_weight=0.3, mixup=0.8),
        "batch norm": {ema_decay: with_batch_norm(ema_decay) for ema_decay in (None, 0.9)},
        "skipped": skipped(),
        "order": order(),
    }
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, results)
    if torch.distributed.get_rank() == 0:
        torch.save(gathered, folder / "results.pt")
