"""Mixing in training: drawn anew at every step, by a key alone; `relvit.data.BatchMix` has tests of its own."""

import pytest
import torch
from small_training import build, train

from relvit.data import BatchMix
from relvit.utils.seeding import seeded

LABELS = torch.tensor([3, 0, 6, 1, 4])
# Constant images: the share of each can be read from the pixels.
IMAGES = torch.arange(5.0)[:, None, None, None].expand(5, 3, 8, 12).contiguous()


def mixed(seed, **kwargs):
    with seeded(seed):
        return BatchMix(7, **kwargs)(IMAGES, LABELS)


def test_what_is_drawn_depends_on_the_key_alone():
    state = torch.get_rng_state()
    first = mixed(5, mixup_alpha=0.8, cutmix_alpha=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, other = mixed(5, mixup_alpha=0.8, cutmix_alpha=1.0), mixed(6, mixup_alpha=0.8, cutmix_alpha=1.0)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_training_on_mixed_images_says_so_and_draws_anew_at_every_step():
    module = build(mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    seen, forward = [], module.loss.forward

    def record(logits, targets):
        seen.append(targets)
        return forward(logits, targets)

    module.loss.forward = record
    trainer = train(module, max_epochs=2, limit_train_batches=2)
    assert {"train/acc1_mixed", "train/acc5_mixed", "val/acc1"} <= set(trainer.callback_metrics)
    assert "train/acc1" not in trainer.callback_metrics
    assert [tuple(targets.shape) for targets in seen] == [(4, 7)] * 4
    # The same images in both epochs, mixed in other ways.
    assert not torch.equal(seen[0], seen[2])
    # The larger share counts as the class.
    with torch.no_grad():
        module.mixing = None
        module.log = module.log_dict = lambda *args, **kwargs: None
        module.train_metrics.reset()
        images = torch.randn(2, 3, 8, 12)
        best = module(images).argmax(-1)
        targets = torch.nn.functional.one_hot(best, 7) * 0.6 + 0.4 / 7
        module.training_step((images, targets), 0)
        assert module.train_metrics.compute()["train/acc1_mixed"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixup": -1.0}, "mixup_alpha is -1.0; give 0"),
        ({"mix_prob": 1.5, "mixup": 1.0}, "prob is 1.5; it is a probability"),
        ({"mix_switch_prob": -0.5, "mixup": 1.0, "cutmix": 1.0}, "switch_prob is -0.5; it is a probability"),
        ({"mix_prob": 0.5}, "mix_prob 0.5 has no effect without mixup or cutmix"),
        ({"mix_switch_prob": 0.1, "cutmix": 1.0}, "mix_switch_prob 0.1 has no effect without mixup and cutmix"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
