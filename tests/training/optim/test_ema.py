"""The moving average of the weights: its curve, its use, what checkpoints hold, and that nothing is exchanged."""

import pytest
import torch
from lightning import Callback
from small_training import KWARGS, Noise, Record, build, train
from torch import nn

from relvit.training import ImageClassifier, WeightAverage
from relvit.training.checkpoints.file import AVERAGE_KEY


def averages(weights, decay, warmup):
    """The average after each step, written out, in float64."""
    result = weights[0].double()
    for t, weight in enumerate(weights[1:], start=2):
        d = min(decay, 1 - t ** (-2 / 3)) if warmup else decay
        result = d * result + (1 - d) * weight.double()
    return result


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_one_update_per_optimiser_step(accumulate, warmup):
    module = build(lr=0.05, warmup_epochs=0, ema_decay=0.8, ema_warmup=warmup)
    record = Record(module)
    train(module, max_epochs=3, accumulate_grad_batches=accumulate)
    assert len(record.weights) == 3 * {1: 6, 2: 3, 4: 2}[accumulate]
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


def test_evaluation_uses_the_average_and_training_the_weights():
    module, data = build(lr=0.05, warmup_epochs=0, ema_decay=0.9), Noise()
    trainer = train(module, data, max_epochs=2)
    raw = module.net.eval()(data.images)
    averaged = module.average.net(data.images)
    assert not torch.allclose(raw, averaged, atol=1e-3)
    loss = nn.functional.cross_entropy(averaged, data.labels)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert trainer.test(module, data, verbose=False)[0]["test/loss"] == pytest.approx(float(loss), rel=1e-5)
    torch.testing.assert_close(module.eval()(data.images), averaged)
    torch.testing.assert_close(module.train()(data.images), raw)


def test_checkpoints_hold_both_and_resuming_goes_on_with_both(tmp_path):
    arguments = {"lr": 0.05, "warmup_epochs": 0, "min_lr": 0.05, "ema_decay": 0.9}
    whole = build(**arguments)
    train(whole, max_epochs=4)
    half = build(**arguments)
    trainer = train(half, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    content = torch.load(tmp_path / "half.ckpt", weights_only=True)
    for key, net in (("state_dict", half.net), (AVERAGE_KEY, half.average.net)):
        assert set(content[key]) == {f"net.{name}" for name in net.state_dict()}
        for name, value in net.state_dict().items():
            assert torch.equal(content[key][f"net.{name}"], value)
    resumed = build(**arguments)
    train(resumed, max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    for ours, theirs in ((resumed.net, whole.net), (resumed.average.net, whole.average.net)):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name


def test_a_checkpoint_evaluates_as_its_average(tmp_path):
    data, module = Noise(), build(lr=0.05, warmup_epochs=0, ema_decay=0.9)
    trainer = train(module, data, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    averaged = module.average.net(data.images)
    raw = {name: value.clone() for name, value in module.net.state_dict().items()}
    fresh = build(ema_decay=0.9)
    results = trainer.validate(fresh, data, ckpt_path=tmp_path / "x.ckpt", verbose=False, weights_only=True)
    loss = nn.functional.cross_entropy(averaged, data.labels)
    assert results[0]["val/loss"] == pytest.approx(float(loss), rel=1e-5)
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    torch.testing.assert_close(loaded(data.images), averaged)
    # Without the option a training goes on from the raw weights.
    plain = build()
    plain.on_fit_start = lambda: [torch.testing.assert_close(plain.net.state_dict()[name], raw[name]) for name in raw]
    train(plain, max_epochs=3, ckpt_path=tmp_path / "x.ckpt")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stop_inside_validation_exchanges_nothing(error, tmp_path):
    class Stop(Callback):
        def on_validation_batch_end(self, trainer, *_, **__):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
                raise error

    module = build(lr=0.05, warmup_epochs=0, ema_decay=0.9)
    record = Record(module)
    with pytest.raises((error, SystemExit)):
        train(module, max_epochs=3, callbacks=[Stop()])
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    for name, value in record.weights[-1].items():
        assert torch.equal(module.net.get_parameter(name), value)
        assert torch.equal(content["state_dict"][f"net.{name}"], value)


def test_the_average_goes_where_the_module_goes():
    module = ImageClassifier("test_relvit", 7, 3, (8, 12), model_kwargs=KWARGS, ema_decay=0.9)
    module.average = WeightAverage(module.net, 0.9)
    module.double()
    assert {parameter.dtype for parameter in module.average.net.parameters()} == {torch.float64}
    assert not any(name.startswith("average") for name in module.state_dict())
