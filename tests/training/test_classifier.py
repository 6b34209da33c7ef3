"""The training module against formulas worked out by hand."""

import math

import pytest
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from relvit.training import ImageClassifier, NonFiniteLossError, warmup_cosine

KWARGS = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "max_distance": 1}


class Noise(LightningDataModule):
    """23 random images of 7 classes in batches of 4, so that the last batch is smaller; image 9 may be spoilt."""

    def __init__(self, spoilt=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(23, 3, 8, 12, generator=generator)
        self.labels = torch.randint(0, 7, (23,), generator=generator)
        if spoilt:
            self.images[9] = math.inf

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


class Record:
    """Learning rates and weights as the optimiser sees them."""

    def __init__(self, module):
        self.rates, self.weights, step = [], [], module.optimizer_step

        def recording(*args, **kwargs):
            optimizer = args[2]
            self.rates.append(optimizer.param_groups[0]["lr"])
            step(*args, **kwargs)
            self.weights.append(module.net.head.weight.detach().clone())

        module.optimizer_step = recording


def build(**kwargs):
    torch.manual_seed(0)
    return ImageClassifier("test_relvit", 7, 3, (8, 12), model_kwargs=KWARGS, **kwargs)


def train(module, data=None, **kwargs):
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )
    trainer.fit(module, data or Noise())
    return trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_learning_rate_of_every_optimiser_step(accumulate):
    module = build(lr=0.01, min_lr=0.001, warmup_epochs=0.5)
    record = Record(module)
    train(module, max_epochs=3, accumulate_grad_batches=accumulate)
    per_epoch = math.ceil(6 / accumulate)
    total, warmup = 3 * per_epoch, round(0.5 * per_epoch)
    # Lightning calls the optimiser's step once per batch while it accumulates; the rate changes per real step.
    expected = [0.01 * warmup_cosine(step, total, warmup, 0.1) for step in range(total)]
    rates = list(dict.fromkeys(record.rates))
    assert rates == pytest.approx(list(dict.fromkeys(expected)))


def test_decay_spares_norms_biases_and_tables():
    module = build(weight_decay=0.3)
    seen = {}
    module.on_train_start = lambda: seen.update(groups=module.trainer.optimizers[0].param_groups)
    train(module, max_epochs=1)
    names = {id(parameter): name for name, parameter in module.net.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in seen["groups"] for p in group["params"]}
    assert set(decay) == set(names.values())
    for name, value in decay.items():
        spared = "norm" in name or name.endswith("bias") or ".position." in name
        assert value == (0.0 if spared else 0.3), name


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
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 2 of epoch 0: stopped before the optimiser"):
        train(module, Noise(spoilt=True), max_epochs=1)
    # The batch with image 9 is the third; Lightning runs training_step inside the optimiser's step.
    assert len(record.weights) == 2
    assert torch.equal(module.net.head.weight, record.weights[-1])
    assert record.weights[-1].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_names": ["a"]}, "class_names holds 1 names, num_classes is 7"),
        ({"min_lr": -1.0}, "need 0 <= min_lr <= lr"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_a_cosine_without_end_is_refused():
    with pytest.raises(ValueError, match=r"give --trainer.max_epochs or --trainer.max_steps"):
        train(build(), max_epochs=-1)
