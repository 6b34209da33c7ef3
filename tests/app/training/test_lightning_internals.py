"""`validation_due` reads a private attribute of Lightning, which still tells when a validation is due."""

from lightning.pytorch.callbacks import LambdaCallback
from small_training import build, train

from relvit.app.training.lightning_internals import validation_due


def test_a_validation_is_due_after_every_third_of_six_batches():
    found = []
    watch = LambdaCallback(on_train_batch_end=lambda trainer, *_: found.append(validation_due(trainer)))
    train(build(), max_epochs=1, accumulate_grad_batches=2, val_check_interval=3, callbacks=[watch])
    assert found == [False, False, True, False, False, True]
