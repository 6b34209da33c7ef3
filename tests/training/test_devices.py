"""Two processes (gloo, on the CPU) against one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from small_training import NoiseImages, Record, build, train
from timm.models import save_for_hf
from torch import nn

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "two_processes.py"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder of timm: a ViT of other weights than the student's, with large logits."""
    folder, kwargs = tmp_path_factory.mktemp("teacher"), {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    torch.manual_seed(3)
    net = timm.create_model("vit_tiny_patch16_224", img_size=(8, 12), num_classes=7, **kwargs)
    nn.init.normal_(net.head.weight, std=3.0)
    save_for_hf(net, folder, model_args=kwargs | {"img_size": [8, 12]})
    return str(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory, teacher):
    """What each of the two processes found."""
    path = tmp_path_factory.mktemp("two") / "results.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
    command += [path, teacher]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def same(ours, theirs, **kwargs):
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}", **kwargs)


@pytest.mark.parametrize("count", [23, 1])
def test_validation_and_test_count_every_image_once(both, count):
    data, module = NoiseImages(count), build()
    for rank in both:
        found = rank["evaluate"][count]
        module.load_state_dict(found["weights"])
        logits = module.eval()(data.images).detach()
        expected = {
            "loss": nn.functional.cross_entropy(logits, data.labels),
            "acc1": (logits.argmax(-1) == data.labels).float().mean(),
            "acc5": (logits.topk(5).indices == data.labels[:, None]).any(-1).float().mean(),
        }
        for split in ("val", "test"):
            for name, value in expected.items():
                assert found["results"][f"{split}/{name}"] == pytest.approx(float(value), rel=1e-5), (split, name)


def test_two_devices_make_the_steps_of_one_with_the_double_batch(both):
    module = build(opt="sgd", lr=0.1, warmup_epochs=0, label_smoothing=0.0, lr_base_batch=16, ema_decay=0.9)
    record = Record(module)
    train(module, NoiseImages(16, in_order=True, batch_size=8), max_epochs=2)
    for rank in both:
        assert rank["step"]["rates"] == pytest.approx(record.rates)
        assert rank["step"]["rates"][0] == pytest.approx(0.05)  # 0.1 for 16 images, but 8
        assert len(rank["step"]["steps"]) == len(record.weights) == 4
        for ours, theirs in zip(rank["step"]["steps"], record.weights, strict=True):
            same(ours, theirs, atol=1e-6, rtol=1e-5)
        average = {f"net.{name}": value for name, value in module.average.net.state_dict().items()}
        same(rank["step"]["average"], average, atol=1e-6, rtol=1e-5)


def test_frozen_epochs_on_two_devices_are_those_of_one(both):
    module = build(opt="sgd", lr=0.1, warmup_epochs=0, label_smoothing=0.0, lr_base_batch=16, freeze_epochs=1)
    record = Record(module)
    train(module, NoiseImages(16, in_order=True, batch_size=8), max_epochs=2)
    for rank in both:
        for ours, theirs in zip(rank["frozen"]["steps"], record.weights, strict=True):
            same(ours, theirs, atol=1e-6, rtol=1e-5)


def test_distillation_on_two_devices_is_that_of_one(both, teacher):
    arguments = {"opt": "sgd", "lr": 0.1, "warmup_epochs": 0, "label_smoothing": 0.0, "lr_base_batch": 16}
    finals = []
    for options in ({"teacher": teacher}, {}):
        module = build(**arguments, **options)
        record = Record(module)
        train(module, NoiseImages(16, in_order=True, batch_size=8), max_epochs=2)
        finals.append(record.weights)
    # The teacher makes a difference at all.
    assert not torch.allclose(finals[0][-1]["head.weight"], finals[1][-1]["head.weight"], atol=1e-3)
    for rank in both:
        assert len(rank["hard"]["steps"]) == len(finals[0]) == 4
        for ours, theirs in zip(rank["hard"]["steps"], finals[0], strict=True):
            same(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["hard", "mixed"])
def test_the_teacher_on_two_devices(kind, both, teacher):
    images, own = NoiseImages(16).images, build().state_dict()
    net = timm.create_model(f"local-dir:{teacher}", pretrained=True).state_dict()
    first, second = (rank[kind] for rank in both)
    for ours, theirs in zip(first["steps"], second["steps"], strict=True):
        same(ours, theirs, atol=0, rtol=0)
    for found in (first, second):
        assert len(found["student"]) == len(found["teacher"]) == 4
        for ours, theirs in zip(found["student"], found["teacher"], strict=True):
            assert torch.equal(ours, theirs)
            known = [bool((images == image).flatten(1).all(1).any()) for image in ours]
            assert known == [kind != "mixed"] * 4
        assert found["modes"] == [False] * 4
        assert set(found["names"]) == set(own)
        assert not found["averaged"]
        same(found["weights of the teacher"], net, atol=0, rtol=0)
    # Each process mixes its own images.
    assert not torch.equal(first["student"][0], second["student"][0])


def test_validation_within_a_training_with_batch_norm(both):
    # 17 images: nine and eight, three batches of four at most and two.
    metrics = [
        {name: value for name, value in rank["batch norm"]["metrics"].items() if name.startswith("val/")}
        for rank in both
    ]
    assert metrics[0] == metrics[1]
    right = metrics[0]["val/acc1"] * 17
    assert right == pytest.approx(round(right), abs=1e-4)


def test_training_shares_the_images_anew_in_each_epoch(both):
    epochs = [[index for rank in both for e, seen in rank["order"] if e == epoch for index in seen] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
