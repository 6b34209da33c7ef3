"""Metrics exist when callbacks read them, and reading them in one process alone, as progress bars do, never waits."""

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback
from photos import TINY
from processes import Ranks, as_torchrun
from small_training import Noise, build, train

from relvit.app.training.labels import OneLabel
from relvit.app.training.metrics import count_batch, epoch_metrics

BAR_OFF = "--trainer.enable_progress_bar=false"


@pytest.mark.slow
def test_a_bar_reads_on_one_process_alone(photos, tmp_path):
    """A progress bar reads metrics during training, validation and the test of the best checkpoint."""
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", *(a for a in TINY if a != BAR_OFF)]
    # Each of the two processes has 9 of 18 images in batches of 5, so the last batch is smaller.
    arguments += ["--data.batch_size=5", "--model.warmup_epochs=0", "--runs=runs", "--trainer.max_epochs=2"]
    ranks = Ranks([*arguments, "--trainer.callbacks=failures.MetricReader"], tmp_path, as_torchrun())
    assert ranks.finish(seconds=90) == [0, 0], ranks.text()
    # Only the main process prints.
    assert ranks.text().count("effective batch") == 1
    assert ranks.text().count("18 training images: cat 6, dog 6, owl 6") == 1
    assert "Test accuracy" in ranks.text()


class Seen(Callback):
    """A callback that records the metrics at the end of epochs, where Lightning calls callbacks before the module."""

    def __init__(self):
        self.found, self.right = [], []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module.val_metrics, "val/")

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module.train_metrics, "train/")

    def on_test_epoch_end(self, trainer, pl_module):
        self.note(trainer, pl_module.test_metrics, "test/")

    def note(self, trainer, metrics, prefix):
        self.found.append({name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(prefix)})
        self.right.append({name: float(value) for name, value in metrics.compute().items()})


@pytest.mark.parametrize("options", [{}, {"max_steps": 9}, {"limit_train_batches": 2, "limit_val_batches": 1}])
def test_callbacks_see_the_metrics_of_this_epoch(options):
    module, data, seen = build(warmup_epochs=0), Noise(), Seen()
    train(module, data, max_epochs=2, callbacks=[seen], **options).test(module, data, verbose=False)
    assert seen.found == seen.right
    assert len({values["train/loss"] for values in seen.found if "train/loss" in values}) == len(seen.found) // 2


def test_the_bar_shows_the_mean_of_the_epoch_so_far():
    shown = []

    def note(trainer, pl_module, outputs, batch, batch_idx):
        metrics = trainer.progress_bar_metrics
        shown.append((float(outputs["loss"]), len(batch[1]), metrics["loss"], metrics["acc"]))

    trainer = train(build(warmup_epochs=0), max_epochs=2, callbacks=[LambdaCallback(on_train_batch_end=note)])
    for epoch in (shown[:6], shown[6:]):
        losses, counts, means, _ = (torch.tensor(column) for column in zip(*epoch, strict=True))
        torch.testing.assert_close(means, (losses * counts).cumsum(0) / counts.cumsum(0))
    assert shown[-1][3] == pytest.approx(float(trainer.callback_metrics["train/acc1"]))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_sums_are_float32_or_more_in_every_precision(precision):
    """If sums were in bfloat16, the mean loss of 1,500 images could be 1.0 instead of 0.729."""
    options = {"opt": "sgd", "lr": 1e-3, "warmup_epochs": 0}
    module, losses, norms = build(**options), [], []
    step, before = module.training_step, module.on_before_optimizer_step

    def training_step(batch, batch_idx):
        loss = step(batch, batch_idx)
        losses.append((float(loss.detach()), len(batch[1])))
        return loss

    def on_before_optimizer_step(optimizer):
        gradients = [p.grad.double().flatten() for p in module.net.parameters() if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        before(optimizer)

    module.training_step, module.on_before_optimizer_step = training_step, on_before_optimizer_step
    seen = []
    note = LambdaCallback(
        on_train_epoch_end=lambda *_: seen.append(module.train_metrics.compute() | module.step_metrics.compute()),
        on_validation_epoch_end=lambda *_: seen.append(module.val_metrics.compute()),
    )
    train(module, max_epochs=1, precision=precision, callbacks=[note])
    validated, trained = seen
    mean = sum(loss * images for loss, images in losses) / 23
    assert float(trained["train/loss"]) == pytest.approx(mean, rel=1e-6)
    assert float(trained["train/grad_norm"]) == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    logits = module.eval()(Noise().images.to(module.dtype)).double()
    expected = torch.nn.functional.cross_entropy(logits, Noise().labels)
    # With two-byte weights, logits of a batch may be rounded differently from logits of all images at once.
    tolerance = 1e-6 if precision == "64-true" else 2e-3
    assert float(validated["val/loss"]) == pytest.approx(float(expected), rel=tolerance)


@pytest.mark.parametrize(("split", "is_nan"), [("train", False), ("val", True), ("test", True)])
def test_a_loss_of_nan_counts_in_an_evaluation(split, is_nan):
    """In training the mean leaves NaN out, because the step is skipped."""
    metrics, labels = epoch_metrics(OneLabel(), 3, f"{split}/"), torch.tensor([0, 1])
    for loss in (0.5, float("nan")):
        count_batch(metrics, torch.tensor(loss), torch.zeros(2, 3), labels)
    assert bool(metrics.compute()[f"{split}/loss"].isnan()) == is_nan
