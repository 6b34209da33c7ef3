"""`RunCheckpoints`: `last.ckpt` never holds the score of a `best.ckpt` that was not written."""

import errno
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from small_training import SeveralLabels, build, train

from relvit.app.training import AtomicCheckpointIO, RunCheckpoints


class FailsOnce(AtomicCheckpointIO):
    """Fail to write the second best.ckpt, as a network file system does for a moment."""

    def __init__(self):
        super().__init__()
        self.best = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if Path(path).name == "best.ckpt":
            self.best += 1
            if self.best == 2:
                raise OSError(errno.EIO, "Input/output error")
        super().save_checkpoint(checkpoint, path, storage_options)


def test_a_validation_whose_best_checkpoint_was_not_written_is_repeated(tmp_path):
    def fit(folder, writer, ckpt_path=None):
        module = build(lr=1e-3, warmup_epochs=0.0)
        callbacks, options = [RunCheckpoints(folder)], {"max_epochs": 2, "enable_checkpointing": True}
        train(module, ckpt_path=ckpt_path, callbacks=callbacks, plugins=[writer], **options)

    def read(name):
        content = torch.load(tmp_path / name, weights_only=True)
        return content["epoch"], content["callbacks"]["RunCheckpoints"]["epoch"]

    with pytest.raises(OSError, match="Input/output error"):
        fit(tmp_path, FailsOnce())
    assert (read("best.ckpt"), read("last.ckpt")) == ((0, 1), (0, 1))
    fit(tmp_path, AtomicCheckpointIO(), tmp_path / "last.ckpt")
    assert (read("best.ckpt"), read("last.ckpt")) == ((1, 2), (1, 2))


class StopsIn(Callback):
    """Save a checkpoint in the middle of a validation, and stop."""

    def __init__(self, path):
        self.path = path

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)
            raise KeyError


def test_a_second_training_of_a_classifier_does_not_take_the_first_ones_validation_for_its_own(tmp_path):
    module, few = build(warmup_epochs=0.0), {"max_epochs": 1, "limit_train_batches": 2}
    train(module, **few)
    with pytest.raises(KeyError):
        train(module, callbacks=[StopsIn(tmp_path / "x.ckpt")], **few)
    assert not torch.load(tmp_path / "x.ckpt", weights_only=True)["position"]["validated"]


def test_the_loss_chooses_the_best_checkpoint_where_no_image_has_a_label(tmp_path):
    """Mean average precision is NaN then. If it chose, the first checkpoint would always be the best."""
    data = SeveralLabels(8)
    data.labels[:] = False
    module, best = build(lr=1e-2, warmup_epochs=0.0, multi_label=True), RunCheckpoints(tmp_path, monitor="val/map")
    train(module, data, callbacks=[best], plugins=[AtomicCheckpointIO()], max_epochs=3, enable_checkpointing=True)
    assert best.best_epoch == 3


def test_a_loss_of_nan_is_worse_than_any_other_at_the_same_score(tmp_path):
    best, saved = RunCheckpoints(tmp_path), []
    for epoch, loss in enumerate([math.nan, 2.0, math.nan, 1.0, 3.0]):
        trainer = SimpleNamespace(
            state=SimpleNamespace(fn="fit"),
            sanity_checking=False,
            callback_metrics={"val/acc1": 0.5, "val/loss": loss},
            current_epoch=epoch,
            save_checkpoint=lambda path, epoch=epoch: saved.append(epoch),
        )
        best.on_validation_end(trainer, None)
    assert saved == [0, 1, 3]
