"""Training, evaluation and sharding (fsdp2) in two processes against one process; all of it runs once."""

import pytest
import timm
import torch
from lightning import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from photos import TINY
from processes import Ranks, as_torchrun
from small_training import HALTING, NoiseImages, Record, SeveralLabels, assert_close, build, train
from timm.models import save_for_hf
from torch import nn
from two_processes import CHANGES, OPTIMIZERS, REVERSIBLE, SHARDED, STEP, main

from relvit.cli import main as relvit
from relvit.training import load_classifier
from relvit.training.checkpoints.checkpoint import DescribeCheckpoint
from relvit.training.checkpoints.file import AVERAGE_KEY
from relvit.training.multi_label import multi_label_metrics
from relvit.training.optim.sharding import FullySharded, check_strategy

CLOSE, SHARDED_CLOSE = {"atol": 1e-6, "rtol": 1e-5}, {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder of checkpoints, and what each of the two processes found."""
    folder = tmp_path_factory.mktemp("two")
    kwargs = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    torch.manual_seed(3)
    # A teacher of other weights than the student's, with large logits.
    net = timm.create_model("vit_tiny_patch16_224", img_size=(8, 12), num_classes=7, **kwargs)
    nn.init.normal_(net.head.weight, std=3.0)
    save_for_hf(net, folder / "teacher", model_args=kwargs | {"img_size": [8, 12]})
    ranks = Ranks([folder], folder, as_torchrun(), main)
    assert ranks.finish(240) == [0, 0], ranks.text()
    return folder, torch.load(folder / "results.pt")


def content(path):
    return torch.load(path, weights_only=True)


def expected_metrics(classifier, data):
    """Written out: every image counts once."""
    logits = classifier.eval()(data.images).detach()
    return {
        "loss": float(nn.functional.cross_entropy(logits, data.labels)),
        "acc1": float((logits.argmax(-1) == data.labels).float().mean()),
        "acc5": float((logits.topk(5).indices == data.labels[:, None]).any(-1).float().mean()),
    }


def alone(**options):
    """The same training in one process with the double batch."""
    trainer_options = {name: options.pop(name) for name in ("gradient_clip_val",) if name in options}
    module = build(**options)
    record = Record(module)
    data = NoiseImages(16, in_order=True, batch_size=8)
    return record, train(module, data, max_epochs=2, callbacks=[DescribeCheckpoint()], **trainer_options)


@pytest.mark.parametrize("count", [23, 1])
def test_evaluation_counts_every_image_once(found, count):
    data, module = NoiseImages(count), build()
    for rank in found[1]:
        module.load_state_dict(rank["evaluate"][count]["weights"])
        for name, value in expected_metrics(module, data).items():
            for split in ("val", "test"):
                assert rank["evaluate"][count]["results"][f"{split}/{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("count", [23, 1])
def test_evaluation_of_several_labels_counts_every_image_once(found, count):
    """With one image a process has none, and still takes part."""
    data, module = SeveralLabels(count), build(multi_label=True)
    for rank in found[1]:
        results, thresholds = (rank["several labels"][count][name] for name in ("results", "thresholds"))
        module.load_state_dict(rank["several labels"][count]["weights"])
        with torch.no_grad():
            probabilities = module.eval()(data.images).sigmoid()
        expected = multi_label_metrics(probabilities.numpy(), data.labels.numpy())
        torch.testing.assert_close(torch.tensor(thresholds), torch.from_numpy(expected.threshold).float())
        loss = nn.functional.binary_cross_entropy(probabilities, data.labels.float())
        for name, value in {"loss": float(loss), **expected.means()}.items():
            for split in ("val", "test"):
                assert results[f"{split}/{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step", {"ema_decay": 0.9}),
        ("frozen", {"freeze_epochs": 1}),
        ("reversible", {"model_kwargs": REVERSIBLE}),
        ("halting", HALTING),
    ],
)
def test_two_devices_make_the_steps_of_one_with_the_double_batch(found, name, options):
    folder, ranks = found
    record, trainer = alone(**STEP, **options)
    for rank in ranks:
        assert rank[name]["rates"] == pytest.approx(record.rates)
        assert rank[name]["rates"][0] == pytest.approx(0.05)  # 0.1 for 16 images, but 8
        assert len(rank[name]["steps"]) == len(record.weights) == 4
        for ours, theirs in zip(rank[name]["steps"], record.weights, strict=True):
            assert_close(ours, theirs, **CLOSE)
    if "ema_decay" in options:
        average = {f"net.{n}": value for n, value in trainer.lightning_module.average.net.state_dict().items()}
        assert_close(content(folder / "step.ckpt")[AVERAGE_KEY], average, **CLOSE)


def test_distillation_on_two_devices_is_that_of_one(found):
    folder, ranks = found
    (record, _), (without, _) = alone(**STEP, teacher=str(folder / "teacher")), alone(**STEP)
    assert not torch.allclose(record.weights[-1]["head.weight"], without.weights[-1]["head.weight"], atol=1e-3)
    for rank in ranks:
        for ours, theirs in zip(rank["hard"]["steps"], record.weights, strict=True):
            assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("kind", ["hard", "mixed"])
def test_the_teacher_sees_what_the_student_sees_and_stays(kind, found):
    folder, ranks = found
    images, checkpoint = NoiseImages(16).images, content(folder / f"{kind}.ckpt")
    net = timm.create_model(f"local-dir:{folder / 'teacher'}", pretrained=True).state_dict()
    assert set(checkpoint["state_dict"]) == set(build().state_dict())
    assert AVERAGE_KEY not in checkpoint
    first, second = (rank[kind] for rank in ranks)
    for ours, theirs in zip(first["steps"], second["steps"], strict=True):
        assert_close(ours, theirs)
    for rank in (first, second):
        assert len(rank["student"]) == len(rank["teacher"]) == 4
        for ours, theirs in zip(rank["student"], rank["teacher"], strict=True):
            assert torch.equal(ours, theirs)
            assert [bool((images == image).flatten(1).all(1).any()) for image in ours] == [kind != "mixed"] * 4
        assert rank["modes"] == [False] * 4
        assert_close(rank["weights of the teacher"], net)
    # Each process mixes its own images.
    assert not torch.equal(first["student"][0], second["student"][0])


def test_validation_within_a_training_with_batch_norm(found):
    # 17 images: nine and eight, three batches of four at most and two.
    first, second = (rank["batch norm"] for rank in found[1])
    assert first == second
    assert first["val/acc1"] * 17 == pytest.approx(round(first["val/acc1"] * 17), abs=1e-4)


def test_training_divides_the_images_anew_in_each_epoch(found):
    seen = [pair for rank in found[1] for pair in rank["order"]]
    epochs = [[index for e, indices in seen if e == epoch for index in indices] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_sharded_steps_norms_averages_and_checkpoints_are_those_of_one_process(opt, found, tmp_path):
    folder, ranks = found
    record, trainer = alone(opt=opt, gradient_clip_val=0.5, **SHARDED)
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    for rank in ranks:
        assert rank["sharded steps"][opt]["norms"] == pytest.approx(record.norms, rel=1e-5)
        for ours, theirs in zip(rank["sharded steps"][opt]["steps"], record.weights, strict=True):
            assert_close(ours, theirs, **SHARDED_CLOSE)
    ours, theirs = content(folder / f"{opt}.ckpt"), content(tmp_path / "alone.ckpt")
    assert set(ours) == set(theirs)
    for name in ("state_dict", AVERAGE_KEY):
        assert list(ours[name]) == list(theirs[name])
        assert_close(ours[name], theirs[name], **SHARDED_CLOSE)
    (ours,), (theirs,) = (side["optimizer_states"] for side in (ours, theirs))
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert_close(ours["state"][number], state, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_training_is_resumed_sharded_and_not(first, second, found):
    """Bit by bit where it was sharded before and after."""
    folder, _ = found
    whole, resumed = content(folder / "whole.ckpt"), content(folder / f"{first}_{second}.ckpt")
    tolerances = {} if first == second else SHARDED_CLOSE
    for name in ("state_dict", AVERAGE_KEY):
        assert_close(resumed[name], whole[name], **tolerances)
    for number, state in whole["optimizer_states"][0]["state"].items():
        assert_close(resumed["optimizer_states"][0]["state"][number], state, **tolerances)


def test_a_sharded_training_starts_from_pretrained_weights(found):
    folder, _ = found
    module = build(lr=0.01, pretrained=str(folder / "adamw.ckpt"), warmup_epochs=0, label_smoothing=0.0)
    train(module, NoiseImages(16, in_order=True, batch_size=8), max_epochs=1)
    assert_close(content(folder / "pretrained.ckpt")["state_dict"], module.state_dict(), **SHARDED_CLOSE)


@pytest.mark.parametrize("count", [23, 1])
def test_sharded_evaluation_counts_every_image_once_by_the_averaged_weights(count, found):
    folder, ranks = found
    expected = expected_metrics(load_classifier(folder / "adamw.ckpt"), NoiseImages(count))
    for rank in ranks:
        results = rank["sharded evaluation"][count]
        for split in ("val", "test"):
            for name, value in expected.items():
                assert results["after"][f"{split}/{name}"] == pytest.approx(value, rel=1e-5)
        assert results["fresh"]["val/loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert results["inside"]["val/loss"] != pytest.approx(expected["loss"], rel=1e-3)
    assert sum(rank["sharded evaluation"][count]["predicted"] for rank in ranks) == count


def test_other_strategies_that_shard_are_refused(photos, tmp_path, capsys):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *TINY]
    assert relvit([*arguments, "--trainer.strategy=deepspeed_stage_3"]) == 2
    assert "strategy deepspeed_stage_3 cannot train here" in (error := capsys.readouterr().err)
    assert "give --trainer.strategy fsdp2" in error
    assert list(tmp_path.iterdir()) == []
    for strategy in (FSDPStrategy(), ModelParallelStrategy(), "fsdp", "fsdp_cpu_offload"):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        with pytest.raises(ValueError, match=f"{name} cannot train here"):
            check_strategy(strategy)
    for strategy in (FullySharded(), "fsdp2", "ddp"):
        check_strategy(strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt": "muon"}, "no optimiser 'muon'; allowed are 'adam', "),
        ({"compile": "eager"}, "does not go with compile"),
        ({"channels_last": True}, "does not go with channels_last"),
        ({"precision": "bf16-true"}, "no precision 'bf16-true'; allowed are '32-true', 'bf16-mixed'"),
        ({"batch_norm": True}, "does not go with batch norm"),
        ({"model_kwargs": {"reversible": True}}, "does not go with reversible=True"),
    ],
)
def test_what_is_not_tested_sharded_is_refused(options, message):
    precision, batch_norm = options.pop("precision", "32-true"), options.pop("batch_norm", False)
    module = build(**options)
    if batch_norm:
        module.net.norm = nn.BatchNorm1d(8)
    module.trainer = Trainer(accelerator="cpu", devices=1, strategy="fsdp2", precision=precision, logger=False)
    with pytest.raises(ValueError, match=message):
        module.setup("fit")
