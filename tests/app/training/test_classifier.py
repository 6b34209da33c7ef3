"""The training module compared with formulas: steps, metrics, mixing, precision, compilation, errors."""

import pytest
import timm
import torch
from small_training import Noise, assert_close, build, train

from relvit.app.training.optim.gradients import recompute_blocks

OPTIONS = {"lr": 0.02, "warmup_epochs": 0}
FEW = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}


@pytest.fixture(scope="module")
def plain():
    """Return the weights and the metrics after a few steps."""
    module = build(**OPTIONS)
    metrics = train(module, **FEW).callback_metrics
    return {name: value.clone() for name, value in module.state_dict().items()}, metrics


def test_metrics_count_every_sample_once():
    module, data = build(), Noise()
    trainer = train(module, data, max_epochs=1)
    logits = module.eval()(data.images).detach()
    expected = {
        "val/loss": torch.nn.functional.cross_entropy(logits, data.labels),
        "val/acc1": (logits.argmax(-1) == data.labels).float().mean(),
        "val/acc5": (logits.topk(5).indices == data.labels[:, None]).any(-1).float().mean(),
    }
    results = trainer.validate(module, data, verbose=False)[0]
    assert results == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    # If there are fewer images than processes, a process predicts an empty batch, for which the model must not be
    # called.
    module.net.register_forward_pre_hook(lambda *_: pytest.fail("computes"))
    assert module.predict_step((data.images[:0], []), 0)["probabilities"].shape == (0, 7)


def test_training_on_mixed_images_is_named_so_and_mixes_anew_at_every_step():
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
    # Both epochs have the same images, but mix them differently.
    assert not torch.equal(seen[0], seen[2])
    # The larger part of a mixed image counts as its class. One step with known targets shows it.
    module = build(mixup=0.8)
    module.log_dict, module.trainer = lambda *args, **kwargs: None, trainer
    module.mixing, images = None, torch.randn(2, 3, 8, 12)
    targets = torch.nn.functional.one_hot(module(images).argmax(-1), 7) * 0.6 + 0.4 / 7
    module.training_step((images, targets), 0)
    assert module.train_metrics.compute()["train/acc1_mixed"] == 1.0


def test_channels_last_gives_the_same_numbers(plain):
    module = build(channels_last=True, ema_decay=0.9, **OPTIONS)
    train(module, **FEW)
    assert module.net.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)
    # Attention does not depend on the bias of keys, so its gradient is only rounding errors, which Adam amplifies.
    assert_close(module.state_dict(), plain[0], atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_computes_each_block_twice_with_the_same_numbers(plain):
    module, calls = build(grad_checkpointing=True, **OPTIONS), []
    module.net.blocks[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    train(module, **FEW)
    assert calls.count(True) == 2 * FEW["limit_train_batches"]
    assert_close(module.state_dict(), plain[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "match"),
    [("test_relvit_rev", "already"), ("crossvit_tiny_240", "CrossVit has no gradient checkpointing: leave out")],
)
def test_models_without_gradient_checkpointing_are_refused_before_the_training(model, match):
    net = timm.create_model(model, num_classes=2)
    with pytest.raises(ValueError, match=match):
        recompute_blocks(net)


@pytest.mark.slow
def test_compiled_training_has_the_same_numbers_and_names(plain, monkeypatch):
    compiled, compile_module = [], torch.nn.Module.compile

    def record(net, **options):
        compiled.append(net)
        compile_module(net, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", record)
    module = build(compile="eager", ema_decay=0.9, **OPTIONS)
    assert compiled == []
    train(module, **FEW)
    assert compiled == [module.net, module.average.net]
    assert_close(module.state_dict(), plain[0], atol=2e-5, rtol=1e-4)


def test_bf16_mixed_precision_trains_full_precision_weights(plain):
    module = build(**OPTIONS)
    dtypes, forward = [], module.net.forward

    def record(images):
        logits = forward(images)
        dtypes.append(logits.dtype)
        return logits

    module.net.forward = record
    metrics = train(module, precision="bf16-mixed", **FEW).callback_metrics
    assert set(dtypes) == {torch.bfloat16}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert float(metrics["val/loss"]) == pytest.approx(float(plain[1]["val/loss"]), rel=0.03)
