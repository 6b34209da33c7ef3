"""Trainings and evaluations in two processes (gloo, on the CPU), whose results a test compares with those of one."""

from pathlib import Path

import torch
from lightning import Callback
from small_training import HALTING, NoiseImages, Record, SeveralLabels, build, record_steps, train
from torch import nn

from relvit.training import AtomicCheckpointIO
from relvit.training.checkpoints.checkpoint import DescribeCheckpoint
from relvit.training.optim.sharding import gather_full, is_sharded

STEP = {"opt": "sgd", "lr": 0.1, "warmup_epochs": 0, "label_smoothing": 0.0, "lr_base_batch": 16}
SHARDED = {"lr": 0.01, "warmup_epochs": 0, "label_smoothing": 0.0, "ema_decay": 0.9, "freeze_epochs": 1}
RESUMED = SHARDED | {"min_lr": 0.01}
REVERSIBLE = {"reversible": True, "depth": 3}
CHANGES = [("fsdp2", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp2")]


def fit(module, strategy="ddp", data=None, ckpt_path=None, **kwargs):
    """Two epochs of 16 images in order, four in each process and step."""
    options = {"max_epochs": 2, "devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    options |= {"plugins": [AtomicCheckpointIO()], "callbacks": [DescribeCheckpoint(), *kwargs.pop("callbacks", [])]}
    return train(module, data or NoiseImages(16, in_order=True), ckpt_path, **options | kwargs)


def content(path):
    return torch.load(path, weights_only=True)


def expected_metrics(classifier, data):
    """Written out: every image counts once."""
    logits = classifier.eval()(data.images).detach()
    return {
        "loss": float(nn.functional.cross_entropy(logits, data.labels)),
        "acc1": float((logits.argmax(-1) == data.labels).float().mean()),
        "acc5": float((logits.topk(5).indices == data.labels[:, None]).any(-1).float().mean()),
    }


def alone(**options):
    """The training of `fit` in one process with the double batch."""
    trainer_options = {name: options.pop(name) for name in ("gradient_clip_val",) if name in options}
    module = build(**options)
    record = Record(module)
    data = NoiseImages(16, in_order=True, batch_size=8)
    return record, train(module, data, max_epochs=2, callbacks=[DescribeCheckpoint()], **trainer_options)


class Shown(Callback):
    """The images that student and teacher are shown in training, and the teacher's mode at each of them."""

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


def evaluate(count, multi_label=False):
    """Validation and test of freshly built weights on so many images."""
    module, data = build(multi_label=multi_label), (SeveralLabels if multi_label else NoiseImages)(count)
    trainer = fit(module, data=data, max_epochs=1, limit_train_batches=1)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    results = trainer.validate(module, data, verbose=False)[0] | trainer.test(module, data, verbose=False)[0]
    return {"weights": weights, "results": results, "thresholds": module.thresholds}


def steps(folder, name, **options):
    """Weights and rates of each step, and a checkpoint of the end."""
    module = build(**STEP, **options)
    record = Record(module)
    fit(module).save_checkpoint(folder / f"{name}.ckpt")
    return {"steps": record.weights, "rates": record.rates}


def distilled(folder, name, **options):
    """The same beside a teacher, and what both were shown."""
    module = build(**STEP, teacher=str(folder / "teacher"), **options)
    record, shown = Record(module), Shown()
    fit(module, callbacks=[shown]).save_checkpoint(folder / f"{name}.ckpt")
    found = {"steps": record.weights, "student": shown.student, "teacher": shown.teacher, "modes": shown.modes}
    return found | {"weights of the teacher": module.teacher.net.state_dict()}


def with_batch_norm():
    """Validation within a training of a network whose buffers DDP broadcasts, on images that do not divide."""
    module = build()
    module.net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(48, 7))
    metrics = fit(module, data=NoiseImages(17), max_epochs=1).callback_metrics
    return {name: float(value) for name, value in metrics.items() if name.startswith("val/")}


def order():
    """Images of each epoch, in the order in which this process trained on them."""
    module, data, seen = build(warmup_epochs=0), NoiseImages(12), []
    record_steps(module, lambda batch, _: seen.append((module.current_epoch, data.indices(batch[0]))))
    fit(module, data=data)
    return seen


def sharded_steps(folder, opt):
    """Weights after each step, the norms of gradients, and a checkpoint."""
    folder, module = Path(folder), build(opt=opt, **SHARDED)
    record = Record(module)
    trainer = fit(module, "fsdp2", gradient_clip_val=0.5)
    assert is_sharded(module.net)
    assert is_sharded(module.average.net)
    trainer.save_checkpoint(folder / f"{opt}.ckpt")
    gather(folder, {"steps": [gather_full(weights) for weights in record.weights], "norms": record.norms})


def sharded_resume(folder):
    """Three epochs in one go, and from checkpoints of two by either strategy: sharded, and not."""
    fit(build(**RESUMED), "fsdp2", max_epochs=3).save_checkpoint(folder / "whole.ckpt")
    for strategy in ("fsdp2", "ddp"):
        fit(build(**RESUMED), strategy).save_checkpoint(folder / f"{strategy}.ckpt")
    for first, second in CHANGES:
        trainer = fit(build(**RESUMED), second, ckpt_path=folder / f"{first}.ckpt", max_epochs=3)
        trainer.save_checkpoint(folder / f"{first}_{second}.ckpt")


def sharded_pretrained(folder):
    """From the weights of a file, which does not exist any more when the training is resumed."""
    options = {"lr": 0.01, "warmup_epochs": 0, "label_smoothing": 0.0}
    module = build(pretrained=str(folder / "adamw.ckpt"), **options)
    fit(module, "fsdp2", max_epochs=1).save_checkpoint(folder / "pretrained.ckpt")
    torch.distributed.barrier()
    fit(build(pretrained=str(folder / "gone.ckpt"), **options), "fsdp2", ckpt_path=folder / "pretrained.ckpt")


def sharded_evaluation(count, folder):
    """Validation and test, on so many images, of the weights of a checkpoint: the averaged ones."""
    module, data = build(ema_decay=0.9), NoiseImages(count)
    trainer = fit(module, "fsdp2", data, max_epochs=1, limit_train_batches=1, num_sanity_val_steps=1)
    inside = {name: float(value) for name, value in trainer.callback_metrics.items()}
    stored = {"ckpt_path": folder / "adamw.ckpt", "weights_only": True}
    after = trainer.validate(module, data, verbose=False, **stored)[0]
    after |= trainer.test(module, data, verbose=False, **stored)[0]
    fresh = trainer.validate(build(), data, verbose=False, **stored)[0]
    predictions = trainer.predict(module, data.test_dataloader(), **stored)
    return {"inside": inside, "after": after, "fresh": fresh, "predicted": sum(len(p["names"]) for p in predictions)}


def gather(folder, results):
    """Save what each process found, in order."""
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, results)
    if torch.distributed.get_rank() == 0:
        torch.save(gathered, folder / "results.pt")


def trainings(folder):
    folder = Path(folder)
    results = {
        "evaluate": {count: evaluate(count) for count in (23, 1)},
        "several labels": {count: evaluate(count, multi_label=True) for count in (23, 1)},
        "step": steps(folder, "step", ema_decay=0.9),
        "frozen": steps(folder, "frozen", freeze_epochs=1),
        "reversible": steps(folder, "reversible", model_kwargs=REVERSIBLE),
        "halting": steps(folder, "halting", **HALTING),
        "hard": distilled(folder, "hard"),
        "mixed": distilled(folder, "mixed", distill="soft", distill_weight=0.3, mixup=0.8),
        "batch norm": with_batch_norm(),
        "order": order(),
    }
    gather(folder, results)


def sharded_trainings(folder):
    folder = Path(folder)
    sharded_steps(folder, "adamw")
    sharded_resume(folder)
    sharded_pretrained(folder)
    gather(folder, {count: sharded_evaluation(count, folder) for count in (23, 1)})
