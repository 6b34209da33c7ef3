"""Training in shards (two processes, gloo, on the CPU) against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from photos import TINY
from sharded_processes import CHANGES, OPTIMIZERS, STEPS
from small_training import NoiseImages, Record, build, train
from torch import nn

from relvit.cli import main
from relvit.training import load_classifier
from relvit.training.checkpoints.checkpoint import DescribeCheckpoint
from relvit.training.checkpoints.file import AVERAGE_KEY
from relvit.training.optim.sharding import FullySharded, check_strategy

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "sharded_processes.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder with checkpoints of the two processes, and what each of them found."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "results.pt")


def close(ours, theirs, **kwargs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}", **kwargs)


def content(path):
    return torch.load(path, weights_only=True)


def alone(path, **kwargs):
    """The same training in one process with the double batch; its record and norms of gradients."""
    module = build(**kwargs)
    record, norms, log = Record(module), [], module.log

    def noting(name, value, **options):
        if name == "grad_norm":
            norms.append(float(value))
        log(name, value, **options)

    module.log = noting
    data = NoiseImages(16, in_order=True, batch_size=8)
    trainer = train(module, data, max_epochs=3, gradient_clip_val=0.5, callbacks=[DescribeCheckpoint()])
    trainer.save_checkpoint(path)
    return record, norms


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_steps_norms_averages_and_checkpoints_are_those_of_one_process(opt, found, tmp_path):
    folder, ranks = found
    record, norms = alone(tmp_path / "alone.ckpt", opt=opt, lr=0.01, **STEPS)
    assert len(record.weights) == 6
    for rank in ranks:
        assert rank["steps"][opt]["norms"] == pytest.approx(norms, rel=1e-5)
        for ours, theirs in zip(rank["steps"][opt]["steps"], record.weights, strict=True):
            close(ours, theirs, atol=1e-5, rtol=1e-4)
    ours, theirs = content(folder / f"{opt}.ckpt"), content(tmp_path / "alone.ckpt")
    assert set(ours) == set(theirs)
    for name in ("state_dict", AVERAGE_KEY):
        close(ours[name], theirs[name], atol=1e-5, rtol=1e-4)
    (ours,), (theirs,) = (side["optimizer_states"] for side in (ours, theirs))
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        close(ours["state"][number], state, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_training_goes_on_in_shards_and_without(first, second, found):
    """Bit by bit where it was in shards before and after."""
    folder, _ = found
    whole, gone_on = content(folder / "whole.ckpt"), content(folder / f"{first}_{second}.ckpt")
    apart = {"atol": 0, "rtol": 0} if first == second else {"atol": 1e-5, "rtol": 1e-4}
    for name in ("state_dict", AVERAGE_KEY):
        close(gone_on[name], whole[name], **apart)
    for number, state in whole["optimizer_states"][0]["state"].items():
        close(gone_on["optimizer_states"][0]["state"][number], state, **apart)


def test_a_training_starts_from_pretrained_weights(found):
    folder, _ = found
    start = str(folder / "adamw.ckpt")
    module = build(lr=0.01, pretrained=start, warmup_epochs=0, label_smoothing=0.0)
    train(module, NoiseImages(16, in_order=True, batch_size=8), max_epochs=1)
    close(content(folder / "pretrained.ckpt")["state_dict"], module.state_dict(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [23, 1])
def test_evaluation_counts_every_image_once_by_the_averaged_weights(count, found):
    folder, ranks = found
    classifier, data = load_classifier(folder / "adamw.ckpt"), NoiseImages(count)
    logits = classifier(data.images).detach()
    loss = float(nn.functional.cross_entropy(logits, data.labels))
    accuracy = float((logits.argmax(-1) == data.labels).float().mean())
    for rank in ranks:
        results = rank["evaluate"][count]
        for split in ("val", "test"):
            assert results["after"][f"{split}/loss"] == pytest.approx(loss, rel=1e-5)
            assert results["after"][f"{split}/acc1"] == pytest.approx(accuracy)
        assert results["fresh"]["val/loss"] == pytest.approx(loss, rel=1e-5)
        assert results["inside"]["val/loss"] != pytest.approx(loss, rel=1e-3)
    assert sum(rank["evaluate"][count]["predicted"] for rank in ranks) == count


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload", "deepspeed_stage_3"])
def test_other_shards_are_refused_at_the_start(strategy, photos, tmp_path, capsys):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *TINY]
    assert main([*arguments, f"--trainer.strategy={strategy}"]) == 2
    told = capsys.readouterr().err
    assert f"strategy {strategy} cannot train here" in told
    assert "give --trainer.strategy fsdp2" in told
    assert list(tmp_path.iterdir()) == []


def test_strategies_as_objects():
    for strategy in (FSDPStrategy(), ModelParallelStrategy()):
        with pytest.raises(ValueError, match=f"{type(strategy).__name__} cannot train here"):
            check_strategy(strategy)
    check_strategy(FullySharded())
    check_strategy("ddp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt": "muon"}, "no optimiser 'muon'; allowed are 'adam', "),
        ({"compile": "eager"}, "does not go with compile"),
        ({"channels_last": True}, "does not go with channels_last"),
        ({"precision": "bf16-true"}, "no precision 'bf16-true'; allowed are '32-true', 'bf16-mixed'"),
    ],
)
def test_options_that_are_not_known_to_work_in_shards_are_refused(options, message):
    precision = options.pop("precision", "32-true")
    module = build(**options)
    module.trainer = Trainer(accelerator="cpu", devices=1, strategy="fsdp2", precision=precision, logger=False)
    with pytest.raises(ValueError, match=message):
        module.setup("fit")


def test_batch_norm_is_refused():
    module = build()
    module.net.norm = nn.BatchNorm1d(8)
    module.trainer = Trainer(accelerator="cpu", devices=1, strategy="fsdp2", logger=False)
    with pytest.raises(ValueError, match="does not go with batch norm"):
        module.setup("fit")
