"""The learning rate compared with its closed formula, in the function and in trainings."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
from small_training import Noise, NoiseImages, Record, build, train
from torch.utils.data import DataLoader

from relvit.app.training import warmup_cosine
from relvit.app.training.optim.schedule import batch_size_of


def test_closed_form():
    factors = [warmup_cosine(step, total=10, warmup=4, floor=0.1) for step in range(11)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    for step in range(4, 11):
        assert factors[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 6)) / 2)
    assert warmup_cosine(0, total=5, warmup=0, floor=0.0) == warmup_cosine(0, total=1, warmup=0, floor=0.0) == 1.0


def curve(lr, min_lr, steps, warmup):
    """Compute the learning rate of every step by the formula."""
    rise = [lr * (step + 1) / (warmup + 1) for step in range(warmup)]
    fall = steps - warmup
    return rise + [min_lr + (lr - min_lr) * (1 + math.cos(math.pi * step / fall)) / 2 for step in range(fall)]


@pytest.mark.parametrize(
    ("warmup_epochs", "options", "steps", "warmup", "note"),
    [
        # An epoch has six batches. With 4 accumulated batches, the last two batches also make a step.
        (1.5, {"max_epochs": 4, "accumulate_grad_batches": 4, "limit_val_batches": 0}, 8, 3, ""),
        (0.5, {"max_epochs": -1, "max_steps": 8}, 8, 3, ""),
        (5, {"max_steps": 1}, 1, 0, "Note: the training is too short for a warm-up, so there is none\n"),
    ],
)
def test_every_optimiser_step_has_its_rate(warmup_epochs, options, steps, warmup, note, capsys):
    module = build(lr=0.01, min_lr=0.001, warmup_epochs=warmup_epochs)
    record = Record(module)
    train(module, **options)
    assert record.rates == pytest.approx(curve(0.01, 0.001, steps, warmup))
    assert f"steps {steps}, warm-up {warmup}\n{note}" in capsys.readouterr().out


@pytest.mark.parametrize("tested", [False, True])
def test_a_warmup_takes_at_most_half_of_a_training_also_of_one_that_is_resumed_for_longer(tested, tmp_path, capsys):
    """The warm-up is set to five epochs of two steps: half of one epoch is one step, half of five is five."""
    module, longer = (build(lr=0.01, min_lr=0.001, warmup_epochs=5) for _ in range(2))
    record, few = Record(module), {"limit_train_batches": 2, "limit_val_batches": 0}
    trainer = train(module, max_epochs=1, **few)
    if tested:
        # Lightning forgets the loaders of the training, so the checkpoint does not say where the training was.
        trainer.test(module, Noise(), verbose=False)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert record.rates == pytest.approx(curve(0.01, 0.001, 2, 1))
    assert (
        "steps 2, warm-up 1\nNote: the warm-up would take 10 steps: it takes 1, half of the training, so that the full"
    ) in capsys.readouterr().out
    record = Record(longer)
    train(longer, max_epochs=5, ckpt_path=tmp_path / "one.ckpt", **few)
    assert record.rates == pytest.approx(curve(0.01, 0.001, 10, 5)[2:])
    assert "it takes 5, half" in capsys.readouterr().out


def test_rate_for_a_batch_grows_with_the_batch(capsys):
    module = build(lr=0.01, min_lr=0.001, lr_base_batch=16, warmup_epochs=0, layer_decay=0.5)
    record = Record(module)
    train(module, max_epochs=2, accumulate_grad_batches=2, limit_val_batches=0)
    # As in DeiT, min_lr is not scaled. The first group is the stem, two layers below the classifier.
    assert record.rates == pytest.approx([0.25 * rate for rate in curve(0.005, 0.001, 6, 0)])
    assert (
        "effective batch 8 (4 x 2 x 1: batch, accumulation, devices), learning rate 0.005 (0.01 x 8 / 16), steps 6, "
        "warm-up 0\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "options", "batch"),
    [
        # An epoch has 23 images in six batches, 8 images in two batches, or 5 images in a batch of 64.
        (Noise, {"accumulate_grad_batches": 8}, 23),
        (Noise, {"accumulate_grad_batches": 8, "limit_train_batches": 2}, 8),
        (partial(NoiseImages, 5, batch_size=64), {}, 5),
    ],
)
def test_an_epoch_of_fewer_images_than_a_batch_is_the_batch(data, options, batch, capsys):
    module = build(lr=0.01, min_lr=0, lr_base_batch=256, warmup_epochs=0)
    record = Record(module)
    train(module, data(), max_epochs=2, limit_val_batches=0, **options)
    assert record.rates == pytest.approx(curve(0.01 * batch / 256, 0, 2, 0))
    out = capsys.readouterr().out
    assert f"effective batch {batch} (an epoch has no more), learning rate" in out
    assert f"(lr_base_batch): give --model.lr_base_batch {batch}, which takes 0.01 as it is\n" in out


def test_a_small_rate_and_a_backbone_that_stays_frozen_are_noted(capsys):
    few = {"limit_train_batches": 2, "limit_val_batches": 0}
    given = {"lr": 0.01, "min_lr": 0, "warmup_epochs": 0, "freeze_epochs": 2}
    train(build(**given, lr_base_batch=64), max_epochs=2, accumulate_grad_batches=2, **few)
    out = capsys.readouterr().out
    assert (
        "Note: the learning rate is small, since --model.lr 0.01 is for batches of 64 (lr_base_batch): "
        "--trainer.accumulate_grad_batches 16 makes such batches; for few images give --model.lr_base_batch 8, which "
        "takes 0.01 as it is\n"
    ) in out
    assert "Note: the backbone stays frozen to the end, and the classifier alone is trained: freeze_epochs 2 is" in out
    train(build(**given, lr_base_batch=16), max_epochs=3, **few)
    assert "Note:" not in capsys.readouterr().out


class Batches:
    """A user's batch sampler, which does not tell the size of its batches."""

    def __iter__(self):
        yield [0, 1]

    def __len__(self):
        return 1


def test_a_loader_that_does_not_say_its_batch_size():
    loaders = {
        "batch_sampler, Batches": DataLoader([1, 2], batch_sampler=Batches()),
        "sampler, SequentialSampler": DataLoader([1, 2], batch_size=None),
    }
    for part, loader in loaders.items():
        trainer = SimpleNamespace(train_dataloader=loader)
        with pytest.raises(
            ValueError, match=f"DataLoader, does not .*: give its {part}, the attribute batch_size, the"
        ):
            batch_size_of(trainer)
        getattr(loader, part.partition(",")[0]).batch_size = 2
        assert batch_size_of(trainer) == 2
    with pytest.raises(ValueError, match=r"the training loader, Batches, .*: give it the attribute batch_size, the"):
        batch_size_of(SimpleNamespace(train_dataloader=Batches()))
    for loader in ([DataLoader([1, 2], batch_size=2)], {"a": DataLoader([1, 2], batch_size=2)}):
        with pytest.raises(
            ValueError, match=f"from a {type(loader).__name__} of loaders: give one loader, such as a D"
        ):
            batch_size_of(SimpleNamespace(train_dataloader=loader))
