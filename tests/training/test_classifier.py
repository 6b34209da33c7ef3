"""The training module against formulas worked out by hand."""

import pytest
import torch
from small_training import Noise, Record, build, train

from relvit.training import NonFiniteLossError


def test_metrics_count_every_sample_once():
    module, data = build(), Noise()
    trainer = train(module, data, max_epochs=1)
    module.eval()
    logits = module(data.images).detach()
    expected = {
        "val/loss": torch.nn.functional.cross_entropy(logits, data.labels),
        "val/acc1": (logits.argmax(-1) == data.labels).float().mean(),
        "val/acc5": (logits.topk(5).indices == data.labels[:, None]).any(-1).float().mean(),
    }
    results = trainer.validate(module, data, verbose=False)[0]
    assert results == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


def test_training_loss_is_smoothed_cross_entropy():
    module, data = build(label_smoothing=0.2), Noise()
    logits = module(data.images[:4])
    module._trainer = train(build(), data, max_epochs=1, limit_train_batches=1)  # for self.log
    module.log = module.log_dict = lambda *args, **kwargs: None
    loss = module.training_step((data.images[:4], data.labels[:4]), 0)
    log_p = logits.log_softmax(-1)
    target = torch.nn.functional.one_hot(data.labels[:4], 7) * 0.8 + 0.2 / 7
    torch.testing.assert_close(loss, -(target * log_p).sum(-1).mean())


def test_non_finite_loss_leaves_the_weights_of_the_step_before():
    module = build(warmup_epochs=0)
    record = Record(module)
    with pytest.raises(
        NonFiniteLossError, match=r"the loss is nan at step 3, in epoch 1: stopped before the optimiser"
    ):
        train(module, Noise(spoilt=True), max_epochs=1)
    # The batch with image 9 is the third; Lightning runs training_step inside the optimiser's step.
    assert len(record.weights) == 2
    assert torch.equal(module.net.head.weight, record.weights[-1]["head.weight"])
    assert record.weights[-1]["head.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_names": ["a"]}, "class_names holds 1 names, num_classes is 7"),
        ({"min_lr": -1.0}, "need 0 <= min_lr <= lr"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"lr_base_batch": 0}, "lr_base_batch must be 1 or more"),
        ({"ema_decay": 1.0}, "ema_decay must be in 0 <= x < 1"),
        ({"freeze_epochs": -1}, "freeze_epochs must be 0 or more"),
        ({"compile": "inducter"}, r"unknown backend of torch.compile 'inducter' \(did you mean 'inductor'\?\)"),
        ({"loss": "bec"}, r"loss must be one of 'ce', 'bce', got 'bec' \(did you mean 'bce'\?\)"),
        ({"opt": "adamv"}, r"unknown optimiser 'adamv' \(did you mean 'adam"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_a_cosine_without_end_is_refused():
    with pytest.raises(ValueError, match=r"give --trainer.max_epochs or --trainer.max_steps"):
        train(build(), max_epochs=-1)
