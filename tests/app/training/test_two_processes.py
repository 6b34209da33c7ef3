"""Training and evaluation in two processes compared with one process; the two processes run once for all tests.

The other files of this folder have quicker tests in one process; `data/loading` tests how images are divided.
"""

import math

import pytest
import timm
import torch
from processes import Ranks, as_torchrun
from small_training import HALTING, VIT, NoiseImages, SeveralLabels, assert_close, build
from timm.models import save_for_hf
from torch import nn
from two_processes import REVERSIBLE, STEP, alone, content, trainings

from relvit.app.training.checkpoints.file import AVERAGE_KEY
from relvit.app.training.class_metrics import multi_label_metrics

pytestmark = pytest.mark.slow

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The folder of checkpoints, and the results of both processes."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(3)
    # The teacher has other weights than the student, and large logits.
    net = timm.create_model("vit_tiny_patch16_224", img_size=(8, 12), num_classes=7, **VIT)
    nn.init.normal_(net.head.weight, std=3.0)
    save_for_hf(net, folder / "teacher", model_args=VIT | {"img_size": [8, 12]})
    ranks = Ranks([folder], folder, as_torchrun(), trainings)
    assert ranks.finish(240) == [0, 0], ranks.text()
    return folder, torch.load(folder / "results.pt")


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("count", [23, 1])
def test_evaluation_counts_every_image_once(found, count, multi_label):
    """If there is only one image, the second process has none, but still takes part."""
    data, module = (SeveralLabels if multi_label else NoiseImages)(count), build(multi_label=multi_label)
    for rank in found[1]:
        evaluated = rank["evaluate"][count, multi_label]
        module.load_state_dict(evaluated["weights"])
        with torch.no_grad():
            logits = module.eval()(data.images)
        if multi_label:
            scores = multi_label_metrics(logits.sigmoid().numpy(), data.labels.numpy())
            assert evaluated["thresholds"] == pytest.approx(scores.threshold, rel=1e-5)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, data.labels.float())
            expected = {"loss": float(loss), **scores.means()}
        else:
            hits = logits.argsort(descending=True) == data.labels[:, None]
            expected = {f"acc{k}": float(hits[:, :k].any(1).float().mean()) for k in (1, 5)}
            expected["loss"] = float(nn.functional.cross_entropy(logits, data.labels))
        for split in ("val", "test"):
            found_here = {name: evaluated["results"][f"{split}/{name}"] for name in expected}
            assert found_here == pytest.approx(expected, rel=1e-5)


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
        # The option `lr`, 0.1, is for 16 images, and a step has half as many.
        assert rank[name]["rates"][0] == pytest.approx(0.05)
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
    # Each process mixes its images differently.
    assert not torch.equal(first["student"][0], second["student"][0])


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_validation_within_a_training_with_batch_norm(found, ema_decay):
    """All processes validate with the batch norm statistics of the main process, which checkpoints hold, too."""
    # Of the 17 images, the first process has nine in three batches, the second has eight in two batches.
    first, second = (rank["batch norm"][ema_decay] for rank in found[1])
    assert len(first) == len(second) == 2
    labels = NoiseImages(17).labels
    for (metrics, logits), (metrics_of_second, _) in zip(first, second, strict=True):
        assert metrics == metrics_of_second
        assert metrics["val/loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert metrics["val/acc1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()), rel=1e-5)


def test_a_step_that_all_processes_skip_counts_once(found):
    first, second = (rank["skipped"] for rank in found[1])
    assert first == second
    assert first["train/skipped_steps"] == 1
    assert math.isfinite(first["train/grad_norm"])


def test_training_divides_the_images_anew_in_each_epoch(found):
    seen = [pair for rank in found[1] for pair in rank["order"]]
    epochs = [[index for e, indices in seen if e == epoch for index in indices] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
