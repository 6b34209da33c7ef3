"""Run by torchrun in two processes: trainings and evaluations whose results the test compares with those of one.

torchrun --standalone --nproc-per-node 2 tests/support/two_processes.py FILE TEACHER
"""

import sys

import torch
from lightning import Callback
from small_training import NoiseImages, Record, build, train
from torch import nn

from relvit.training.checkpoints.file import AVERAGE_KEY

DISTRIBUTED = {"devices": 2, "strategy": "ddp"}


def evaluate(count):
    """Validation and test of freshly built weights on so many images, and how many batches this process had."""
    module, data = build(), NoiseImages(count)
    trainer = train(module, data, max_epochs=1, limit_train_batches=1, **DISTRIBUTED)
    fitted = {name: value.clone() for name, value in module.state_dict().items()}
    results = trainer.validate(module, data, verbose=False)[0] | trainer.test(module, data, verbose=False)[0]
    return {"weights": fitted, "results": results}


def step(**kwargs):
    """Weights after each step of a training in order, four images a device and step."""
    module = build(opt="sgd", lr=0.1, warmup_epochs=0, label_smoothing=0.0, lr_base_batch=16, **kwargs)
    record = Record(module)
    trainer = train(module, NoiseImages(16, in_order=True), max_epochs=2, use_distributed_sampler=False, **DISTRIBUTED)
    trainer.strategy.barrier()
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    return {"steps": record.weights, "rates": record.rates, "average": checkpoint.get(AVERAGE_KEY)}


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


def distilled(teacher, **kwargs):
    """A training in order beside a teacher: weights after each step, what both were shown, what a checkpoint holds."""
    module = build(opt="sgd", lr=0.1, warmup_epochs=0, label_smoothing=0.0, lr_base_batch=16, teacher=teacher, **kwargs)
    record, shown = Record(module), Shown()
    options = {"max_epochs": 2, "use_distributed_sampler": False, "callbacks": [shown]}
    trainer = train(module, NoiseImages(16, in_order=True), **options, **DISTRIBUTED)
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    return {
        "steps": record.weights,
        "student": shown.student,
        "teacher": shown.teacher,
        "modes": shown.modes,
        "names": list(checkpoint["state_dict"]),
        "averaged": AVERAGE_KEY in checkpoint,
        "weights of the teacher": module.teacher.net.state_dict(),
    }


def with_batch_norm():
    """Validation within a training of a network whose buffers DDP broadcasts, on images that do not divide."""
    module = build()
    module.net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(48, 7))
    trainer = train(module, NoiseImages(17), max_epochs=1, **DISTRIBUTED)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": module.state_dict(), "metrics": metrics}


def order():
    """Images of each epoch, in the order in which this process trained on them."""
    module, data, seen = build(warmup_epochs=0), NoiseImages(12), []
    forward = module.training_step

    def record(batch, batch_idx):
        seen.append((module.current_epoch, data.indices(batch[0])))
        return forward(batch, batch_idx)

    module.training_step = record
    train(module, data, max_epochs=2, **DISTRIBUTED)
    return seen


def main(path, teacher):
    results = {
        "evaluate": {count: evaluate(count) for count in (23, 1)},
        "step": step(ema_decay=0.9),
        "frozen": step(freeze_epochs=1),
        "hard": distilled(teacher),
        "mixed": distilled(teacher, distill="soft", distill_weight=0.3, mixup=0.8),
        "batch norm": with_batch_norm(),
        "order": order(),
    }
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, results)
    if torch.distributed.get_rank() == 0:
        torch.save(gathered, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
