"""Evaluation on several devices: every image once, whatever the numbers."""

import math
from types import SimpleNamespace

import pytest
from small_training import NoiseImages


@pytest.mark.parametrize("count", [1, 2, 5, 8, 23])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_image_once_in_as_many_batches_on_every_device(count, world):
    data = NoiseImages(count)
    seen, batches = [], set()
    for rank in range(world):
        data.trainer = SimpleNamespace(world_size=world, global_rank=rank)
        for loader in (data.val_dataloader(), data.test_dataloader()):
            batches.add(len(loader))
            assert len(list(loader)) == len(loader)
            for images, labels in loader:
                assert images.shape[1:] == (3, 8, 12)
                assert len(images) == len(labels) <= 4
                seen += data.indices(images)
                assert labels.tolist() == [int(data.labels[index]) for index in data.indices(images)]
    assert sorted(seen) == sorted(2 * list(range(count)))
    assert len(batches) == 1
    assert batches.pop() == math.ceil(math.ceil(count / world) / 4)
