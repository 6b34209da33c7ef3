"""Run by torchrun in two processes: trainings in shards, whose results the test compares with those of one process.

torchrun --standalone --nproc-per-node 2 tests/support/sharded_processes.py FOLDER
"""

import sys
from pathlib import Path

import torch
from small_training import NoiseImages, Record, build, train

from relvit.training.checkpoints.atomic_io import WholeCheckpoints
from relvit.training.checkpoints.checkpoint import DescribeCheckpoint
from relvit.training.optim.sharding import OPTIMIZERS, gather_full, is_sharded

STEPS = {"warmup_epochs": 0, "label_smoothing": 0.0, "ema_decay": 0.9, "freeze_epochs": 1}
CHANGES = [("fsdp2", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp2")]


def run(strategy, module=None, epochs=3, ckpt_path=None, in_order=True, **kwargs):
    data = NoiseImages(16, in_order=in_order)
    options = {"devices": 2, "use_distributed_sampler": False, "callbacks": [DescribeCheckpoint()]}
    options["plugins"] = [WholeCheckpoints()]
    return train(module, data, ckpt_path, max_epochs=epochs, strategy=strategy, **options | kwargs)


def steps(folder):
    """By each optimiser: the weights after each step, and the checkpoint."""
    found = {}
    for opt in OPTIMIZERS:
        module = build(opt=opt, lr=0.01, **STEPS)
        record, norms = Record(module), []
        log = module.log
        module.log = lambda name, value, log=log, norms=norms, **k: (
            norms.append(float(value)) if name == "grad_norm" else None,
            log(name, value, **k),
        )
        trainer = run("fsdp2", module, gradient_clip_val=0.5)
        assert is_sharded(module.net)
        assert is_sharded(module.average.net)
        trainer.save_checkpoint(folder / f"{opt}.ckpt")
        found[opt] = {"steps": [gather_full(weights) for weights in record.weights], "norms": norms}
    return found


def resume(folder):
    """Three epochs in one go, and from checkpoints of two by either strategy: in shards, and not."""
    options = STEPS | {"lr": 0.01, "min_lr": 0.01}
    run("fsdp2", build(**options)).save_checkpoint(folder / "whole.ckpt")
    for first, second in CHANGES:
        run(first, build(**options), 2).save_checkpoint(folder / "two.ckpt")
        trainer = run(second, build(**options), 3, folder / "two.ckpt")
        trainer.save_checkpoint(folder / f"{first}_{second}.ckpt")


def pretrained(folder):
    """From the weights of a file, which is not there any more when the training goes on."""
    options = {"lr": 0.01, "pretrained": str(folder / "adamw.ckpt"), "warmup_epochs": 0, "label_smoothing": 0.0}
    run("fsdp2", build(**options), 1).save_checkpoint(folder / "pretrained.ckpt")
    torch.distributed.barrier()
    run("fsdp2", build(**options | {"pretrained": str(folder / "gone.ckpt")}), 2, folder / "pretrained.ckpt")


def evaluate(count, folder):
    """Validation and test, on so many images, of the weights of a checkpoint: the averaged ones."""
    module, data = build(ema_decay=0.9), NoiseImages(count)
    options = {"max_epochs": 1, "limit_train_batches": 1, "devices": 2, "strategy": "fsdp2"}
    trainer = train(module, data, num_sanity_val_steps=1, **options)
    inside = {name: float(value) for name, value in trainer.callback_metrics.items()}
    after = {}
    for run_it in (trainer.validate, trainer.test):
        after |= run_it(module, data, verbose=False, ckpt_path=folder / "adamw.ckpt", weights_only=True)[0]
    fresh = trainer.validate(build(), data, verbose=False, ckpt_path=folder / "adamw.ckpt", weights_only=True)[0]
    predictions = trainer.predict(module, data.test_dataloader(), ckpt_path=folder / "adamw.ckpt", weights_only=True)
    return {"inside": inside, "after": after, "fresh": fresh, "predicted": sum(len(p["names"]) for p in predictions)}


def main(folder):
    folder = Path(folder)
    results = {"steps": steps(folder)}
    resume(folder)
    pretrained(folder)
    results["evaluate"] = {count: evaluate(count, folder) for count in (23, 1)}
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, results)
    if torch.distributed.get_rank() == 0:
        torch.save(gathered, folder / "results.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
