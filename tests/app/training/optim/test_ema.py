"""The moving average of the weights (EMA): its values, evaluation with it, and its tensors in checkpoints."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_training import KWARGS, Noise, Record, assert_close, build, train
from torch import nn

from relvit.app.training import ImageClassifier, WeightAverage
from relvit.app.training.checkpoints.file import AVERAGE_KEY

OPTIONS = {"lr": 0.05, "warmup_epochs": 0, "min_lr": 0.05, "ema_decay": 0.9}


def averages(weights, decay, warmup):
    """Compute the average after each step by the formula, in float64."""
    result = weights[0].double()
    for t, weight in enumerate(weights[1:], start=2):
        d = min(decay, 1 - t ** (-2 / 3)) if warmup else decay
        result = d * result + (1 - d) * weight.double()
    return result


@pytest.mark.parametrize(("accumulate", "warmup", "epochs"), [(1, False, 1), (4, True, 3)])
def test_one_update_per_optimiser_step(accumulate, warmup, epochs):
    module = build(lr=0.05, warmup_epochs=0, ema_decay=0.8, ema_warmup=warmup)
    record = Record(module)
    train(module, max_epochs=epochs, accumulate_grad_batches=accumulate, limit_val_batches=0)
    assert len(record.weights) == 6
    for name, value in module.average.net.named_parameters():
        expected = averages([weights[name] for weights in record.weights], 0.8, warmup)
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5)


def test_buffers_are_copied_and_never_averaged():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net.register_buffer("index", torch.tensor([0, 3, 7]))
    average = WeightAverage(net, 0.9, warmup=False)
    net.index += 1
    net[1].running_mean.fill_(4.0)
    for step in (1, 2, 3):
        average.update(net, step)
    assert average.net.index.tolist() == [1, 4, 8]
    assert average.net[1].running_mean.tolist() == [4.0, 4.0]
    assert not any(parameter.requires_grad for parameter in average.net.parameters())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The module and the trainer of two epochs, the weights at each step, and a checkpoint from each validation."""
    module, folder = build(**OPTIONS), tmp_path_factory.mktemp("ema")
    record = Record(module)
    saving = LambdaCallback(
        on_validation_batch_end=lambda trainer, *_: trainer.save_checkpoint(folder / f"{trainer.current_epoch}.ckpt")
    )
    return module, train(module, max_epochs=2, callbacks=[saving]), record, folder


def test_evaluation_uses_the_average_and_training_the_weights(trained):
    module, trainer, _, folder = trained
    data = Noise()
    raw, averaged = module.net.eval()(data.images), module.average.net(data.images)
    assert not torch.allclose(raw, averaged, atol=1e-3)
    loss = pytest.approx(float(nn.functional.cross_entropy(averaged, data.labels)), rel=1e-5)
    assert float(trainer.callback_metrics["val/loss"]) == loss
    assert trainer.test(module, data, verbose=False)[0]["test/loss"] == loss
    torch.testing.assert_close(module.eval()(data.images), averaged)
    torch.testing.assert_close(module.train()(data.images), raw)
    # Evaluation of a checkpoint uses the average as well.
    path = folder / "1.ckpt"
    stored = {"ckpt_path": path, "verbose": False, "weights_only": True}
    assert trainer.validate(build(ema_decay=0.9), data, **stored)[0]["val/loss"] == loss
    loaded = ImageClassifier.load_from_checkpoint(path, weights_only=True).eval()
    torch.testing.assert_close(loaded(data.images), averaged)


def test_checkpoints_hold_both_and_resuming_goes_on_with_both(trained):
    """A validation computes with the average, and must not change the raw weights."""
    whole, _, record, folder = trained
    content = torch.load(folder / "1.ckpt", weights_only=True)
    assert_close(content["state_dict"], {f"net.{name}": value for name, value in record.weights[-1].items()})
    average = {f"net.{name}": value for name, value in whole.average.net.state_dict().items()}
    assert_close(content[AVERAGE_KEY], average)
    resumed = build(**OPTIONS)
    train(resumed, max_epochs=2, ckpt_path=folder / "0.ckpt")
    for ours, theirs in ((resumed.net, whole.net), (resumed.average.net, whole.average.net)):
        assert_close(ours.state_dict(), theirs.state_dict())
    # Without the option, a resumed training continues with the raw weights.
    plain = build(lr=OPTIONS["lr"])
    plain.on_fit_start = lambda: assert_close(dict(plain.net.named_parameters()), record.weights[5])
    train(plain, max_epochs=2, ckpt_path=folder / "0.ckpt")


def test_the_average_moves_with_the_module():
    module = ImageClassifier("test_relvit", 7, 3, (8, 12), model_kwargs=KWARGS, ema_decay=0.9)
    module.average = WeightAverage(module.net, 0.9)
    module.double()
    assert {parameter.dtype for parameter in module.average.net.parameters()} == {torch.float64}
    assert not any(name.startswith("average") for name in module.state_dict())
