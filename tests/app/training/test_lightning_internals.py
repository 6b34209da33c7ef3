"""Private attributes of Lightning, which tell when a validation is due and which options several processes refuse."""

import pytest
from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from small_training import build, train
from timm.layers import BatchNormAct2d
from torch import nn

from relvit.app.training.lightning_internals import validation_due
from relvit.app.training.lightning_options import check_trainer


def test_a_validation_is_due_after_every_third_of_six_batches():
    found = []
    watch = LambdaCallback(on_train_batch_end=lambda trainer, *_: found.append(validation_due(trainer)))
    train(build(), max_epochs=1, accumulate_grad_batches=2, val_check_interval=3, callbacks=[watch])
    assert found == [False, False, True, False, False, True]


def check(processes, norm, **options):
    """Check a trainer of one or two processes for a model that has this batch norm; no process starts."""
    module = build()
    module.net.norm = norm(4)
    options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=processes, **options)
    trainer.strategy.connect(module)
    trainer.state.fn = "fit"
    check_trainer(trainer, None)


@pytest.mark.parametrize(
    ("norm", "options", "message"),
    [
        (BatchNormAct2d, {"sync_batchnorm": True}, "sync_batchnorm would replace BatchNormAct2d by .* without its act"),
        (nn.Identity, {"val_check_interval": "00:00:10:00"}, "val_check_interval is a time, .* by its own clock"),
    ],
    ids=["batch norm with an activation", "clock"],
)
def test_options_that_only_several_processes_refuse(norm, options, message):
    check(1, norm, **options)
    with pytest.raises(ValueError, match=message):
        check(2, norm, strategy="ddp", **options)


def test_several_processes_synchronise_plain_batch_norms():
    check(2, nn.BatchNorm2d, strategy="ddp", sync_batchnorm=True, val_check_interval=0.5)
