"""Frozen backbones: in the first epochs only the classifier is trained."""

import pytest
import torch
from small_training import HALTING, Noise, Record, assert_close, build, record_steps, train

from relvit.app.training import History, NonFiniteLossError, Telemetry

OPTIONS = {"lr": 0.05, "warmup_epochs": 0, "min_lr": 0.05, "freeze_epochs": 2}


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


FEW = {"limit_train_batches": 2, "limit_val_batches": 1}


@pytest.mark.parametrize("without_gradients", [True, False])
def test_only_the_classifier_moves_until_its_epoch_and_a_resumed_training_unfreezes(without_gradients, tmp_path):
    module = build(**OPTIONS)
    start = {name: parameter.detach().clone() for name, parameter in module.net.named_parameters()}
    # On several devices frozen weights still require gradients, which this emulates.
    if not without_gradients:
        set_frozen = module.backbone.set_frozen
        module.backbone.set_frozen = lambda frozen, **_: set_frozen(frozen, without_gradients=False)
    record = Record(module)
    trainer = train(module, max_epochs=3, **FEW)
    head = {"head.weight", "head.bias"}
    assert moved(start, record.weights[0]) == head
    assert moved(start, record.weights[3]) == head
    assert moved(start, record.weights[4]) == set(start)
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert sum(len(g["params"]) for g in trainer.optimizers[0].param_groups) == len(list(module.parameters()))
    # The checkpoints are from the middle of the frozen epochs and from their end.
    for epochs in (1, 2) if without_gradients else ():
        train(build(**OPTIONS), max_epochs=epochs, **FEW).save_checkpoint(tmp_path / "x.ckpt")
        resumed = build(**OPTIONS)
        train(resumed, max_epochs=3, ckpt_path=tmp_path / "x.ckpt", **FEW)
        assert_close(resumed.net.state_dict(), module.net.state_dict())


def test_what_the_user_has_frozen_stays_frozen_and_is_not_in_the_norm_of_the_gradients():
    norms = []
    for frozen in (False, True):
        module = build(**OPTIONS | {"freeze_epochs": int(frozen)})
        module.net.requires_grad_(False)
        module.net.head.requires_grad_(True)
        record = Record(module)
        train(module, max_epochs=2, **FEW)
        norms.append(record.norms)
        assert {p for p in module.net.parameters() if p.requires_grad} == set(module.net.head.parameters())
    assert norms[0] == norms[1]


def test_a_training_after_an_error_in_a_frozen_epoch_trains_all_parameters():
    module = build(**OPTIONS)
    with pytest.raises(NonFiniteLossError):
        train(module, Noise(spoilt=True), max_epochs=1)
    start = {name: parameter.detach().clone() for name, parameter in module.net.named_parameters()}
    train(module, max_epochs=3, **FEW)
    assert moved(start, dict(module.net.named_parameters())) == set(start)


def test_frozen_blocks_are_in_evaluation_mode_through_validation():
    module = build(**OPTIONS | {"freeze_epochs": 1})
    module.net.blocks[0].drop_path1 = torch.nn.Dropout(0.5)
    modes = []
    record_steps(module, lambda *_: modes.append((module.net.blocks[0].drop_path1.training, module.net.head.training)))
    train(module, max_epochs=2, val_check_interval=0.5)
    assert modes == [(False, True)] * 6 + [(True, True)] * 6


def test_a_frozen_epoch_has_no_ponder_cost(tmp_path, monkeypatch, recwarn):
    """Frozen parts are in evaluation mode, in which a model returns no additional losses."""
    monkeypatch.setattr("relvit.app.training.callbacks.history.plot_curves", lambda *_: None)
    history = History(tmp_path, Telemetry(), tensorboard=False)
    train(build(freeze_epochs=1, **HALTING), max_epochs=2, callbacks=[history], **FEW)
    assert ["train/ponder_cost" in row for row in history.rows] == [False, True]
    assert all("train/grad_norm" in row for row in history.rows)
    assert not any("before the ``update``" in str(warning.message) for warning in recwarn)
