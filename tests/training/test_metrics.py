"""Metrics are there when callbacks ask for them, and who reads them alone, as a progress bar does, waits for nobody."""

import pytest
import torch
from lightning import Callback
from photos import TINY
from processes import Ranks, as_torchrun
from small_training import Noise, build, train

BAR_OFF = "--trainer.enable_progress_bar=false"


@pytest.mark.parametrize("count", [2, 3])
def test_a_bar_reads_on_one_process_alone(count, photos, tmp_path):
    # 18 images in batches of 5 on each process: batches are uneven.
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", *(a for a in TINY if a != BAR_OFF)]
    arguments += ["--data.batch_size=5", "--model.warmup_epochs=0", "--runs=runs", "--trainer.max_epochs=2"]
    arguments += ["--trainer.callbacks=metric_reader.MetricReader"]
    ranks = Ranks(arguments, tmp_path, as_torchrun(count))
    assert ranks.finish(seconds=60) == [0] * count, ranks.text()
    # Not every bar prints what a module has to say.
    assert ranks.text().count("effective batch") == 1
    (run,) = (tmp_path / "runs").iterdir()
    for command in ("validate", "test", "predict"):
        arguments = [f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}", "--trainer.accelerator=cpu"]
        arguments += ["--runs=others"] * (command != "validate")
        arguments += [f"--data.root={photos / 'test'}"] * (command == "predict")
        arguments += ["--trainer.callbacks=metric_reader.MetricReader"]
        ranks = Ranks([command, *arguments], tmp_path, as_torchrun(count))
        assert ranks.finish(seconds=60) == [0] * count, ranks.text()


class Seen(Callback):
    """The metrics that a callback sees at the end of epochs, where callbacks come before the module."""

    def __init__(self):
        self.found, self.right = [], []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module, "val/")

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module, "train/")

    def on_test_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module, "test/")

    def note(self, trainer, pl_module, prefix):
        self.found.append({name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(prefix)})
        counted = {"val/": pl_module.val_metrics, "train/": pl_module.train_metrics, "test/": pl_module.test_metrics}
        self.right.append({name: float(value) for name, value in counted[prefix].compute().items()})


@pytest.mark.parametrize("options", [{}, {"max_steps": 9}, {"limit_train_batches": 2, "limit_val_batches": 1}])
def test_callbacks_see_the_metrics_of_this_epoch(options):
    module, data, seen = build(warmup_epochs=0), Noise(), Seen()
    train(module, data, max_epochs=3, callbacks=[seen], **options).test(module, data, verbose=False)
    assert seen.found == seen.right
    assert len({values["train/loss"] for values in seen.found if "train/loss" in values}) == len(seen.found) // 2


class Shown(Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = trainer.progress_bar_metrics
        self.found.append((float(outputs["loss"]), len(batch[1]), metrics["loss"], metrics["acc"]))


def test_the_bar_shows_the_mean_of_the_epoch_so_far():
    shown, module = Shown(), build(warmup_epochs=0)
    trainer = train(module, Noise(), max_epochs=2, callbacks=[shown])
    for epoch in (shown.found[:6], shown.found[6:]):
        losses, counts, means, _ = (torch.tensor(column) for column in zip(*epoch, strict=True))
        torch.testing.assert_close(means, (losses * counts).cumsum(0) / counts.cumsum(0))
    assert shown.found[-1][3] == pytest.approx(float(trainer.callback_metrics["train/acc1"]))
