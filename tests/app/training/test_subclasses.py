"""Subclasses of `ImageClassifier` with steps, metrics and arguments of their own, and other uses from Python."""

import math

import pytest
import torch
from lightning import Trainer
from small_training import KWARGS, NAMES, Noise, build, train, train_and_save
from torch.utils.data import DataLoader, IterableDataset

import relvit
from relvit.app.training import Checkpoint, History, ImageClassifier, NonFiniteLossError, Telemetry


class OwnSteps(ImageClassifier):
    """A subclass that computes its loss and metrics itself, under relvit's names, and leaves out a batch."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self(images), labels)
        self.log("train/own", loss)
        return None if batch_idx == 1 else loss

    def validation_step(self, batch, batch_idx):
        self.log("val/acc1", 0.75)

    test_step = validation_step


def test_steps_of_a_subclass_train_with_its_metrics_alone(tmp_path, monkeypatch):
    """The metrics that relvit's steps would count are NaN or zero, and would replace the subclass's own."""
    monkeypatch.setattr("relvit.app.training.callbacks.history.plot_curves", lambda *_: None)
    module, history = build(cls=OwnSteps, warmup_epochs=0), History(tmp_path, Telemetry(), tensorboard=False)
    trainer = train(module, max_epochs=1, callbacks=[history])
    assert set(trainer.callback_metrics) == {"train/own", "val/acc1", "grad_norm", "lr"}
    assert trainer.callback_metrics["val/acc1"] == history.rows[0]["val/acc1"] == 0.75
    assert {name for name in history.rows[0] if name.startswith("train/")} == {"train/grad_norm"}
    assert not torch.equal(module.net.head.weight, build().net.head.weight)
    assert trainer.test(module, Noise(), verbose=False) == [{"val/acc1": 0.75}]


def test_a_loss_of_a_subclass_that_is_not_finite_stops_the_training():
    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 3"):
        train(build(cls=OwnSteps, warmup_epochs=0), Noise(spoilt=True), max_epochs=1)


class OwnArguments(ImageClassifier):
    """A subclass with an argument that `ImageClassifier` lacks, and another meaning of `lr`."""

    def __init__(self, lr=2.0, width=3, norm=torch.nn.LayerNorm):
        super().__init__("test_relvit", 7, 3, (8, 12), model_kwargs=KWARGS, lr=lr / 100, warmup_epochs=0)
        self.width, self.norm = width, norm


def test_arguments_of_a_subclass_neither_replace_the_classifiers_nor_hinder_its_loading(tmp_path):
    module, path = OwnArguments(), tmp_path / "own.ckpt"
    trainer = train_and_save(path, module, max_epochs=1)
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == module.hparams.lr == 0.02
    images = Noise().images
    with pytest.warns(UserWarning, match="loaders"):
        found = relvit.load(path)
    torch.testing.assert_close(found.probabilities(images), module.eval()(images).softmax(-1).detach())
    assert OwnArguments.load_from_checkpoint(path, lr=2.0, weights_only=True).width == 3


class Manual(ImageClassifier):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


def test_manual_optimisation_is_refused():
    """Lightning would call neither the schedule nor the hook that updates the average."""
    with pytest.raises(ValueError, match=r"automatic_optimization is False, .* return the loss from training_step"):
        train(build(cls=Manual), max_epochs=1)


class Nothing(IterableDataset):
    """The shard of a process that has no image to validate, while other processes have some."""

    def __iter__(self):
        return iter(())


def test_a_process_without_a_batch_computes_the_metrics_which_others_wait_for():
    trainer = Trainer(accelerator="cpu", logger=False)
    (metrics,) = trainer.validate(build(), DataLoader(Nothing(), batch_size=4), verbose=False)
    assert math.isnan(metrics["val/loss"])


def test_weights_may_be_given_by_a_path(tmp_path):
    path = tmp_path / "own.ckpt"
    train_and_save(path, build(class_names=NAMES, warmup_epochs=0), max_steps=1)
    module = build(class_names=NAMES, pretrained=path, teacher=path, warmup_epochs=0)
    train_and_save(tmp_path / "next.ckpt", module, max_steps=1)
    assert Checkpoint.read(tmp_path / "next.ckpt").model["teacher"] == module.hparams.pretrained == str(path)


class Weighted(Noise):
    """A data module with class weights in a tuple."""

    class_weights = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)


def test_own_data_may_hold_class_weights_that_are_no_tensor():
    module = build()
    train(module, Weighted(), max_epochs=1, limit_train_batches=1)
    assert module.loss.weights.tolist() == list(Weighted.class_weights)


@pytest.mark.parametrize(("learns", "rate"), [("", 1e-5), ("position", 1e-4)])
def test_a_user_may_freeze_all_but_the_relative_positions(learns, rate):
    module = build(lr=0.01, position_lr_scale=10.0, warmup_epochs=0)
    for name, parameter in module.net.named_parameters():
        parameter.requires_grad_(learns in name)
    start = {name: parameter.detach().clone() for name, parameter in module.net.named_parameters()}
    trainer = train(module, max_epochs=1, limit_train_batches=2)
    moved = {name for name, parameter in module.net.named_parameters() if not torch.equal(parameter, start[name])}
    assert moved == {name for name, parameter in module.net.named_parameters() if parameter.requires_grad}
    # After the last step the rate is `min_lr`, 1e-5, and of relative positions ten times as high.
    assert float(trainer.callback_metrics["lr"]) == pytest.approx(rate)
