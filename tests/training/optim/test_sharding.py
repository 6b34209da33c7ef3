"""Training, resuming and evaluation in two processes that share the weights (fsdp2), against one process."""

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from photos import TINY
from processes import Ranks, as_torchrun
from small_training import NoiseImages, assert_close, build, train
from torch import nn
from two_processes import CHANGES, SHARDED, alone, content, expected_metrics, sharded_steps, sharded_trainings

from relvit.cli import main
from relvit.training import load_classifier
from relvit.training.checkpoints.file import AVERAGE_KEY
from relvit.training.optim.sharding import OPTIMIZERS, FullySharded, check_strategy

SLOW = pytest.mark.slow
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def run(function, folder, *arguments):
    """What each of two processes found."""
    ranks = Ranks([folder, *arguments], folder, as_torchrun(), function)
    assert ranks.finish(240) == [0, 0], ranks.text()
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder of checkpoints, and what each of the two processes found in evaluation."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run(sharded_trainings, folder)


@pytest.mark.parametrize("opt", [pytest.param(opt, marks=() if opt == "adamw" else SLOW) for opt in OPTIMIZERS])
def test_steps_norms_averages_and_checkpoints_are_those_of_one_process(opt, tmp_path):
    ranks = run(sharded_steps, tmp_path, opt)
    record, trainer = alone(opt=opt, gradient_clip_val=0.5, **SHARDED)
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    for rank in ranks:
        assert rank["norms"] == pytest.approx(record.norms, rel=1e-5)
        for ours, theirs in zip(rank["steps"], record.weights, strict=True):
            assert_close(ours, theirs, **CLOSE)
    ours, theirs = content(tmp_path / f"{opt}.ckpt"), content(tmp_path / "alone.ckpt")
    assert set(ours) == set(theirs)
    for name in ("state_dict", AVERAGE_KEY):
        assert list(ours[name]) == list(theirs[name])
        assert_close(ours[name], theirs[name], **CLOSE)
    (ours,), (theirs,) = (side["optimizer_states"] for side in (ours, theirs))
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert_close(ours["state"][number], state, atol=1e-5, rtol=1e-3)


@SLOW
@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_training_is_resumed_sharded_and_not(first, second, found):
    """Bit by bit where it was sharded before and after."""
    folder, _ = found
    whole, resumed = content(folder / "whole.ckpt"), content(folder / f"{first}_{second}.ckpt")
    tolerances = {} if first == second else CLOSE
    for name in ("state_dict", AVERAGE_KEY):
        assert_close(resumed[name], whole[name], **tolerances)
    for number, state in whole["optimizer_states"][0]["state"].items():
        assert_close(resumed["optimizer_states"][0]["state"][number], state, **tolerances)


@SLOW
def test_a_training_starts_from_pretrained_weights(found):
    folder, _ = found
    module = build(lr=0.01, pretrained=str(folder / "adamw.ckpt"), warmup_epochs=0, label_smoothing=0.0)
    train(module, NoiseImages(16, in_order=True, batch_size=8), max_epochs=1)
    assert_close(content(folder / "pretrained.ckpt")["state_dict"], module.state_dict(), **CLOSE)


@SLOW
@pytest.mark.parametrize("count", [23, 1])
def test_evaluation_counts_every_image_once_by_the_averaged_weights(count, found):
    folder, ranks = found
    expected = expected_metrics(load_classifier(folder / "adamw.ckpt"), NoiseImages(count))
    for rank in ranks:
        results = rank[count]
        for split in ("val", "test"):
            for name, value in expected.items():
                assert results["after"][f"{split}/{name}"] == pytest.approx(value, rel=1e-5)
        assert results["fresh"]["val/loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert results["inside"]["val/loss"] != pytest.approx(expected["loss"], rel=1e-3)
    assert sum(rank[count]["predicted"] for rank in ranks) == count


def test_other_strategies_that_shard_are_refused(photos, tmp_path, capsys):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *TINY]
    assert main([*arguments, "--trainer.strategy=deepspeed_stage_3"]) == 2
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
        ({"model_kwargs": {"reversible": True}}, "reversible=True recomputes a block"),
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
