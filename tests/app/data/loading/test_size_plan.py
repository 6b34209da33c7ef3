"""Training at several sizes: tokens per step, the same size on all devices, each image once, exact resume, graphs."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from grey_folders import add
from lightning import Callback, Trainer
from PIL import Image

from relvit.app.data import ImageFolderData, SizePlan
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.loading.sampler import TrainSampler
from relvit.app.data.loading.size_plan import SizedBatchSampler
from relvit.app.data.transforms import BatchTransform, ResizeToCover, train_transform
from relvit.app.training import ImageClassifier

SIZES = [(16, 16), (32, 32), (16, 32)]


def plan_of(images=1000, schedule="random", **options):
    return SizePlan(SIZES, schedule, (32, 32), 8, images, **options)


def test_all_batches_have_the_same_number_of_pixels_and_sizes_come_equally_often():
    batches = plan_of(images=1120).epoch(0)
    assert {math.prod(size) * images for size, images in batches} == {32 * 32 * 8}
    assert set(Counter(size for size, _ in batches).values()) == {20}
    for first in range(0, 60, 3):
        assert {size for size, _ in batches[first : first + 3]} == set(SIZES)
    assert sum(images for _, images in batches) == 1120
    assert plan_of().epoch(0) == plan_of().epoch(0)
    assert plan_of().epoch(0) != plan_of().epoch(1) != plan_of(seed=5).epoch(1)
    # If one image of a size already exceeds the number of tokens, a batch has one image.
    assert SizePlan([(256, 256)], "random", (32, 32), 8, 9).epoch(3) == [((256, 256), 1)] * 9


@pytest.mark.parametrize("schedule", ["random", "progressive"])
def test_accumulated_batches_share_a_size(schedule):
    plan = plan_of(images=1000, schedule=schedule, accumulated=4, epochs=3)
    for epoch in range(3):
        sizes = [size for size, _ in plan.epoch(epoch)]
        assert len(sizes) == plan.batches
        assert all(len(set(sizes[first : first + 4])) == 1 for first in range(0, len(sizes), 4))


def test_progressive_sizes_grow_in_equal_parts():
    plan = plan_of(images=280, schedule="progressive", epochs=4)
    sizes = [math.prod(size) for epoch in range(4) for size, _ in plan.epoch(epoch)]
    assert sizes == sorted(sizes)
    assert Counter(sizes) == {256: 20, 512: 20, 1024: 20}
    with pytest.raises(ValueError, match="'progressive' divides the training among the sizes: give max_epochs or max"):
        plan_of(schedule="progressive", epochs=-1, steps=-1)


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 30), (5, 6)])
def test_progressive_sizes_end_with_the_steps(accumulated, steps):
    """An epoch has 15 batches."""
    options = {"schedule": "progressive", "accumulated": accumulated, "steps": steps}
    for epochs in (100, -1):
        plan = plan_of(images=280, epochs=epochs, **options)
        counts = Counter(size for epoch in range(2) for size, _ in plan.epoch(epoch))
        assert counts == dict.fromkeys(SIZES, 10)
    assert plan_of(images=280, epochs=1, **options).epoch(0)[-1][0] == (32, 32)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_processes_have_the_same_sizes_and_together_every_image_once(replicas):
    plan = plan_of(images=math.ceil(1120 / replicas), seed=3)
    samplers = [SizedBatchSampler(plan, 1120, None, 1, replicas, rank, 3, epoch=2) for rank in range(replicas)]
    parts = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(part) for part in parts} == {plan.batches}
    for batches in zip(*parts, strict=True):
        assert len({(batch.size, len(batch.indices)) for batch in batches}) == 1
    seen = Counter(item.index for part in parts for batch in part for item in batch.indices)
    # The last round of sizes need not be complete, so a few images may be left out.
    assert len(seen) >= 1120 - 56 * replicas
    assert max(seen.values()) <= 2
    # The order of the images, and the positions that seed the augmentation, are the same as in a training at one size.
    whole = list(TrainSampler(1120, None, 1, replicas, 0, 3, epoch=2))
    flat = [item for batch in parts[0] for item in batch.indices]
    assert flat[: len(whole)] == whole[: len(flat)]


def test_an_epoch_that_is_resumed_goes_on_with_its_next_batch():
    def batches(**options):
        return list(SizedBatchSampler(plan_of(images=300, accumulated=2), 300, None, 2, seed=7, **options))

    assert batches(epoch=1, start=5) == batches(epoch=1)[5:]
    sampler = SizedBatchSampler(plan_of(images=300, accumulated=2), 300, None, 2, seed=7, epoch=1, start=5)
    sampler.set_epoch(2)
    assert list(sampler) == batches(epoch=2)


@pytest.mark.parametrize(("stored", "size"), [((32, 32), (48, 48)), ((32, 32), (20, 28)), ((24, 40), (32, 16))])
def test_batches_in_memory_are_resized_before_a_random_crop(stored, size):
    """Each result is one of the windows of the resized and padded image, up to rounding."""
    values = np.random.default_rng(0).integers(0, 256, (*stored, 3)).astype(np.uint8)
    transform = train_transform(size, (0.0,) * 3, (1 / 255,) * 3, "shift")
    shifted = BatchTransform.like(transform, stored)(torch.from_numpy(values).expand(50, -1, -1, -1))
    covering = torch.from_numpy(np.array(ResizeToCover(size)(Image.fromarray(values)))).permute(2, 0, 1)
    rows, columns = size[0] // 8, size[1] // 8
    windows = F.pad(covering.float(), (columns, columns, rows, rows)).unfold(1, size[0], 1).unfold(2, size[1], 1)
    windows = windows.permute(1, 2, 0, 3, 4).flatten(0, 1)
    assert torch.cdist(shifted.flatten(1), windows.flatten(1), p=torch.inf).amin(1).max() <= 1.5


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for value, name in ((10, "ant"), (100, "bee")):
        add(root / "train" / name, value, 30, (16, 16))
        add(root / "val" / name, value, 3, (16, 16))
    return root


def data_at(images, **options):
    kept = {"img_size": 16, "batch_size": 4, "num_workers": 0, "augment": "shift", "train_sizes": [8, 16, (16, 32)]}
    return ImageFolderData(str(images), **kept | options)


@pytest.mark.parametrize("options", [{}, {"cache": True}, {"num_workers": 2}, {"on_error": "skip"}])
def test_loader_gives_batches_of_each_size(images, options):
    data = data_at(images, **options)
    loader = data.train_dataloader()
    assert isinstance(data.dataset("train"), StackedImages) == ("cache" in options)
    shapes = [tuple(batch.shape) for batch, _ in loader]
    assert len(loader) == len(shapes)
    assert set(shapes) == {(16, 3, 8, 8), (4, 3, 16, 16), (2, 3, 16, 32)}
    assert {tuple(batch.shape[2:]) for batch, _ in data.val_dataloader()} == {(16, 16)}
    # The data module's own transform still has the size `img_size`.
    assert data.dataset("train")[0][0].shape[1:] == (16, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give one or more sizes, each once"),
        ([16, (16, 16)], "give one or more sizes, each once"),
        ([16, 0], "train_sizes is 0; give a positive integer"),
    ],
)
def test_refused(images, given, message):
    with pytest.raises(ValueError, match=message):
        data_at(images, train_sizes=given)
    with pytest.raises(ValueError, match=r"size_schedule is 'progresive'.*did you mean 'progressive'"):
        data_at(images, size_schedule="progresive")
    with pytest.raises(
        ValueError, match="size_schedule 'progressive' has no effect without train_sizes: give both or neither"
    ):
        data_at(images, train_sizes=None, size_schedule="progressive")


def trained(images, callbacks=(), limit_val_batches=1.0, **options):
    data = data_at(images, **options.pop("data", {}))
    model = ImageClassifier("test_relvit", 2, img_size=16, model_kwargs={"patch_size": 8, "depth": 1}, **options)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    kept = {"max_epochs": 2, "accelerator": "cpu", "callbacks": [*callbacks], "limit_val_batches": limit_val_batches}
    trainer = Trainer(**kept, **quiet)
    trainer.fit(model, data)
    return trainer


def test_a_size_that_the_patch_does_not_divide_is_refused_before_training(images):
    with pytest.raises(ValueError, match="image height 20 is not a multiple of the patch size 8"):
        trained(images, data={"train_sizes": [16, 20]})


@pytest.mark.slow
def test_compile_makes_one_graph_for_each_size_and_then_no_more(images):
    made = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sizes = [8, 16, 24]
    # `monkeypatch` would leave the option without a default, so use PyTorch's `patch`.
    with torch._dynamo.config.patch(recompile_limit=1):
        trained(images, [Count()], compile="eager", data={"train_sizes": sizes, "batch_size": 8}, limit_val_batches=0)
    assert made == [len(sizes)] * 2
