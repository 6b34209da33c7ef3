"""Precision, memory format, compilation, clipping and the learning-rate finder in real trainings."""

import math

import pytest
import torch
from small_training import Record, build, train

from relvit.training import FindLearningRate
from relvit.training.optim.lr_finder import steepest_fall

ARGUMENTS = {"lr": 0.02, "warmup_epochs": 0}


def final(module, **kwargs):
    train(module, max_epochs=2, **kwargs)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def plain():
    return final(build(**ARGUMENTS))


def test_channels_last_gives_the_same_numbers(plain):
    module = build(channels_last=True, ema_decay=0.9, **ARGUMENTS)
    weights = final(module)
    assert module.net.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)
    assert set(weights) == set(plain)
    # The keys' bias has no gradient but rounding, which Adam blows up.
    for name, value in weights.items():
        torch.testing.assert_close(value, plain[name], atol=1e-4, rtol=1e-4)


def test_compiled_training_has_the_same_numbers_and_names():
    few = {"limit_train_batches": 2, "limit_val_batches": 1}
    module = build(compile="eager", ema_decay=0.9, **ARGUMENTS)
    assert module.net._compiled_call_impl is None  # loading alone compiles nothing
    compiled = []
    module.on_train_end = lambda: compiled.extend((module.net, module.average.net))
    weights, plain = final(module, **few), final(build(**ARGUMENTS), **few)
    assert all(net._compiled_call_impl is not None for net in compiled)
    assert set(weights) == set(plain)
    for name, value in weights.items():
        torch.testing.assert_close(value, plain[name], atol=2e-5, rtol=1e-4)


def test_bf16_mixed_precision_trains_full_precision_weights(plain):
    module = build(**ARGUMENTS)
    dtypes, forward = [], module.net.forward

    def record(images):
        logits = forward(images)
        dtypes.append(logits.dtype)
        return logits

    module.net.forward = record
    trainer = train(module, max_epochs=2, precision="bf16-mixed")
    assert set(dtypes) == {torch.bfloat16}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    reference = build(**ARGUMENTS)
    expected = float(train(reference, max_epochs=2).callback_metrics["val/loss"])
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=0.03)


def test_gradients_are_clipped_over_all_accumulated_batches():
    module = build(opt="sgd", opt_kwargs={"momentum": 0.0, "nesterov": False}, weight_decay=0.0, **ARGUMENTS)
    before = {name: parameter.detach().clone() for name, parameter in module.net.named_parameters()}
    record = Record(module)
    train(module, max_steps=1, accumulate_grad_batches=3, gradient_clip_val=0.05)
    squares = sum(float((record.weights[0][name] - value).square().sum()) for name, value in before.items())
    assert math.sqrt(squares) == pytest.approx(0.02 * 0.05, rel=1e-4)


@pytest.mark.parametrize("base", [None, 16])
def test_learning_rate_finder_sets_the_whole_schedule_and_leaves_the_rest(base, tmp_path, capsys):
    module = build(lr=1e-3, min_lr=0.0, warmup_epochs=0, lr_base_batch=base, ema_decay=0.9, mixup=0.2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weights, rates, counts, finder = [], [], [], FindLearningRate()

    def record(*_):
        if module.range_test is None:
            weights.append({name: value.clone() for name, value in module.state_dict().items()})
            counts.append(int(module.train_metrics["train/loss"].weight))
            rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    module.on_before_zero_grad = record
    trainer = train(module, max_epochs=2, callbacks=[finder], default_root_dir=tmp_path)
    assert len(finder.rates) > 50
    found = steepest_fall(finder.rates, finder.losses)
    scale = 4 / base if base else 1.0
    assert module.hparams.lr * scale == pytest.approx(found)
    assert module.plan.lr == pytest.approx(found)
    assert module.plan.steps == trainer.global_step == 12
    assert f"learning rate found: {found:.3g}, as --model.lr {found / scale:.3g}" in capsys.readouterr().out
    assert rates == pytest.approx([found * (1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)])
    for name, value in before.items():
        assert torch.equal(weights[0][name], value), name
    assert counts[:6] == [4, 8, 12, 16, 20, 23]
    assert list(tmp_path.iterdir()) == []
