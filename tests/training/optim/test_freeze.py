"""Epochs in which the classifier alone is trained."""

import pytest
import torch
from small_training import Record, build, train

from relvit.training import ImageClassifier

ARGUMENTS = {"lr": 0.05, "warmup_epochs": 0, "min_lr": 0.05}


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("without_gradients", [True, False])
def test_only_the_classifier_moves_until_its_epoch(without_gradients):
    module = build(freeze_epochs=2, **ARGUMENTS)
    start = {name: parameter.detach().clone() for name, parameter in module.net.named_parameters()}
    if not without_gradients:  # as on several devices
        freeze = module.backbone.set_frozen
        module.backbone.set_frozen = lambda frozen, without_gradients=True: freeze(frozen, False)
    record = Record(module)
    train(module, max_epochs=3)
    head = {"head.weight", "head.bias"}
    assert moved(start, record.weights[0]) == head
    assert moved(start, record.weights[11]) == head
    assert moved(start, record.weights[12]) == set(start)


def test_frozen_blocks_are_in_evaluation_mode_through_validation():
    module = build(freeze_epochs=1, **ARGUMENTS)
    module.net.blocks[0].drop_path1 = torch.nn.Dropout(0.5)
    modes, step = [], module.training_step

    def record(*args):
        modes.append((module.net.blocks[0].drop_path1.training, module.net.head.training))
        return step(*args)

    module.training_step = record
    train(module, max_epochs=2, val_check_interval=0.5)
    assert modes == [(False, True)] * 6 + [(True, True)] * 6


def test_every_group_is_there_from_the_start_and_resuming_unfreezes(tmp_path):
    whole = build(freeze_epochs=2, **ARGUMENTS)
    train(whole, max_epochs=3)
    # Two frozen epochs, or one: the checkpoint lies inside or at the end of the frozen time.
    for epochs in (1, 2):
        module = build(freeze_epochs=2, **ARGUMENTS)
        trainer = train(module, max_epochs=epochs)
        assert sum(len(g["params"]) for g in trainer.optimizers[0].param_groups) == len(list(module.parameters()))
        assert all(parameter.requires_grad for parameter in module.parameters())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        resumed = build(freeze_epochs=2, **ARGUMENTS)
        train(resumed, max_epochs=3, ckpt_path=tmp_path / "x.ckpt")
        for name, value in resumed.net.state_dict().items():
            assert torch.equal(value, whole.net.state_dict()[name]), name


def test_a_model_without_classifier_is_refused():
    with pytest.raises(ValueError, match="freeze_epochs needs a model with a classifier; RelVisionTransformer has no"):
        ImageClassifier("test_relvit", 0, freeze_epochs=1)
