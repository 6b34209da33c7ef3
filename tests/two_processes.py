"""Run by torchrun in two processes: trainings and evaluations whose results the test compares with those of one.

torchrun --standalone --nproc-per-node 2 tests/two_processes.py FILE
"""

import sys

import torch
from small_training import NoiseImages, Record, build, train
from torch import nn

from relvit.training.checkpoint_file import AVERAGE_KEY

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


def main(path):
    results = {
        "evaluate": {count: evaluate(count) for count in (23, 1)},
        "step": step(ema_decay=0.9),
        "frozen": step(freeze_epochs=1),
        "batch norm": with_batch_norm(),
        "order": order(),
    }
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, results)
    if torch.distributed.get_rank() == 0:
        torch.save(gathered, path)


if __name__ == "__main__":
    main(sys.argv[1])
