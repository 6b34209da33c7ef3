"""Mixed images and targets: the same shares of the same two images."""

import pytest
import torch
from small_training import build, train

from relvit.training import BatchMixing
from relvit.training.mixing import seeded

LABELS = torch.tensor([3, 0, 6, 1, 4])
# Constant images: the share of each can be read from the pixels.
IMAGES = torch.arange(5.0)[:, None, None, None].expand(5, 3, 8, 12).contiguous()


def mixed(seed, **kwargs):
    with seeded(seed):
        return BatchMixing(7, **kwargs)(IMAGES, LABELS)


def shares(images):
    """Of constant images mixed with their neighbours: the share of the neighbour, from the mean pixel."""
    own, other = torch.arange(5.0), torch.arange(5.0).roll(1)
    return (images.mean((1, 2, 3)) - own) / (other - own)


@pytest.mark.parametrize(
    "kwargs", [{"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}, {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_sum_to_one_and_are_the_shares_of_the_images(kwargs, smoothing):
    for seed in range(20):
        images, targets = mixed(seed, label_smoothing=smoothing, **kwargs)
        torch.testing.assert_close(targets.sum(-1), torch.ones(5))
        for row, share in enumerate(shares(images).tolist()):
            expected = torch.full((7,), smoothing / 7)
            expected[LABELS[row]] += (1 - smoothing) * (1 - share)
            expected[LABELS.roll(1)[row]] += (1 - smoothing) * share
            torch.testing.assert_close(targets[row], expected, atol=1e-5, rtol=1e-4)


def test_mixup_blends_and_cutmix_pastes():
    blended, _ = mixed(1, mixup_alpha=0.8)
    assert torch.equal(blended.amin((1, 2, 3)), blended.amax((1, 2, 3)))
    pasted, _ = mixed(1, cutmix_alpha=1.0)
    assert set(pasted.unique().tolist()) <= set(range(5))


def test_probabilities():
    plain = sum(torch.equal(mixed(seed, mixup_alpha=1.0, prob=0.3)[0], IMAGES) for seed in range(300))
    assert 180 < plain < 240
    kwargs = {"mixup_alpha": 1.0, "cutmix_alpha": 1.0, "switch_prob": 0.8}
    fractions = [mixed(seed, **kwargs)[0].frac().any() for seed in range(300)]  # blends are no whole numbers
    assert 35 < sum(map(int, fractions)) < 85


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
        ({"mixup": -1.0}, "mixup must be 0"),
        ({"mix_prob": 1.5, "mixup": 1.0}, "mix_prob is a probability"),
        ({"mix_switch_prob": -0.5, "mixup": 1.0, "cutmix": 1.0}, "mix_switch_prob is a probability"),
        ({"mix_prob": 0.5}, "mix_prob 0.5 has no effect without mixup or cutmix"),
        ({"mix_switch_prob": 0.1, "cutmix": 1.0}, "mix_switch_prob 0.1 has no effect without mixup and cutmix"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
