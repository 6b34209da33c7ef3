"""Training order and augmentation depend on seed, epoch and position alone; eval shards; resume in an epoch."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grey_folders import GREY, data_of, make
from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from sklearn.utils.class_weight import compute_class_weight
from small_training import NoiseImages, build, train
from torch.utils.data import Dataset

from relvit.app.data import TrainSampler
from relvit.app.data.loading.deterministic import DeterministicDataset, SeededIndex
from relvit.app.data.loading.sampler import class_weights
from relvit.app.utils.seeding import run_seed, seed_all

LABELS = [0] * 90 + [1] * 9 + [2]


def images(sampler):
    """Return the indices of the images in order."""
    return [item.index for item in sampler]


def test_class_weights_are_scikit_learns_balanced():
    weights = class_weights(LABELS, 3)
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    torch.testing.assert_close(weights.double(), torch.from_numpy(wanted), rtol=1e-6, atol=0)
    # The second and the last of four classes have no labels.
    torch.testing.assert_close(class_weights([0, 2, 2, 2], 4), torch.tensor([2.0, 0.0, 2 / 3, 0.0]))


@pytest.mark.parametrize("wrong", [-1, 3])
def test_there_are_no_weights_for_a_label_that_is_no_class(wrong):
    with pytest.raises(ValueError, match=rf"targets must be from 0 to 2, .*, got {wrong}"):
        class_weights([0, 1, wrong], 3)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("count", [7, 30, 2])
def test_copies_and_processes(replicas, repeats, count):
    """The processes share the images of one process, dealt out in turn; copies of an image follow one another."""
    parts = [images(TrainSampler(count, None, repeats, replicas, rank, seed=4)) for rank in range(replicas)]
    assert [len(part) for part in parts] == [-(-count // replicas)] * replicas
    dealt = [index for step in zip(*parts, strict=True) for index in step]
    distinct = dealt[::repeats]
    assert dealt == [image for image in distinct for _ in range(repeats)][: len(dealt)]
    assert set(Counter(distinct[:count]).values()) == {1}
    assert count < 7 or distinct != sorted(distinct)
    if repeats == 1:
        assert set(dealt) == set(range(count))
    if repeats == replicas == 3 and count == 30:
        # With as many processes as copies, each process gets one copy of every image.
        assert [set(parts[0]) == set(part) for part in parts] == [True] * 3


def test_order_follows_seed_and_epoch_alone():
    def order(**kwargs):
        torch.manual_seed(np.random.randint(1000))
        return images(TrainSampler(50, repeats=2, **kwargs))

    assert order(seed=1) == order(seed=1)
    assert order(seed=1) != order(seed=2)
    assert order(seed=1, epoch=0) != order(seed=1, epoch=1)
    sampler = TrainSampler(50, repeats=2, seed=1)
    running = iter(sampler)
    sampler.set_epoch(1)
    assert images(sampler) == order(seed=1, epoch=1)
    # The iterator that was made before keeps the order and the augmentation of epoch 0.
    items = list(running)
    assert [item.index for item in items] == order(seed=1, epoch=0)
    assert {item.epoch for item in items} == {0}


def unequal(tmp_path, **options):
    return data_of(make(tmp_path, train={"ant": 30, "bee": 10, "cat": 2}, val=1), batch_size=7, **options)


def test_balance_and_repeats_of_a_folder(tmp_path):
    data = unequal(tmp_path, balance="sampler")
    loader, counts = data.train_dataloader(), Counter()
    for pixels, labels in loader:
        assert [GREY[data.class_names[label]] for label in labels] == (pixels[:, 0, 0, 0] * 255).round().tolist()
    for epoch in range(20):
        loader.sampler.set_epoch(epoch)
        counts.update(data.dataset("train").targets[index] for index in images(loader.sampler))
    # The standard deviation of the number of 840 images with probability 1/3 is 14.
    assert [counts[c] for c in range(3)] == pytest.approx([280] * 3, abs=60)
    assert data.class_weights is None
    assert sorted(Counter(torch.cat([y for _, y in data.val_dataloader()]).tolist()).values()) == [1, 1, 1]
    weighted = data_of(data.root, balance="loss", batch_size=7, repeats=3)
    torch.testing.assert_close(weighted.class_weights, torch.tensor([42 / 90, 42 / 30, 42 / 6]))
    order = images(weighted.train_dataloader().sampler)
    assert (len(order), set(Counter(order).values())) == (42, {3})
    for wrong, message in (({"balance": "samplr"}, r"'samplr'; allowed .* 'sampler'"), ({"repeats": 0}, "1 or more")):
        with pytest.raises(ValueError, match=message):
            data_of(data.root, **wrong)


def test_lightning_leaves_the_sampler_alone_and_gives_rank_and_epoch(tmp_path, monkeypatch):
    data = unequal(tmp_path, balance="sampler", repeats=2)
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    data.trainer = SimpleNamespace(world_size=2, global_rank=1, current_epoch=4)
    loader = data.train_dataloader()
    weights = class_weights(data.dataset("train").targets, 3)[torch.tensor(data.dataset("train").targets)]
    assert list(loader.sampler) == list(TrainSampler(42, weights, 2, num_replicas=2, rank=1, seed=11, epoch=4))
    connector = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)._data_connector
    monkeypatch.setattr(type(connector.trainer._accelerator_connector), "is_distributed", True)
    assert connector._requires_distributed_sampler(loader) is False


def test_a_resumed_training_begins_with_the_first_batch_that_is_left(tmp_path):
    data = data_of(make(tmp_path, train=7, val=1), augment="resized-crop", batch_size=4)
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        epochs.append(list(loader))
    data.begin_at(1, 2)
    loader = data.train_dataloader()
    assert len(loader) == len(epochs[1])
    rest = list(loader)
    assert len(rest) == len(epochs[1]) - 2 > 0
    for (pixels, labels), (wanted, names) in zip(rest, epochs[1][2:], strict=True):
        assert torch.equal(pixels, wanted)
        assert torch.equal(labels, names)
    loader.sampler.set_epoch(2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(loader, epochs[2], strict=True))


def test_another_training_of_the_same_data_has_all_batches(tmp_path):
    def save(trainer, *_):
        if trainer.global_step == 8:
            trainer.save_checkpoint(tmp_path / "second_epoch.ckpt")

    data = NoiseImages(23)
    train(build(warmup_epochs=0), max_epochs=2, data=data, callbacks=[LambdaCallback(on_train_batch_end=save)])
    train(build(warmup_epochs=0), max_epochs=2, data=data, ckpt_path=tmp_path / "second_epoch.ckpt")
    assert train(build(warmup_epochs=0), max_epochs=2, data=data).global_step == 2 * 6


class Dice(Dataset):
    """Each item is an index and a random number from each of the generators."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), float(torch.rand(()))


class DiceAtOnce(Dice):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_items_follow_from_seed_epoch_and_position_and_leave_no_trace():
    before, dice = state(), DeterministicDataset(Dice(), seed=1)
    first = dice[SeededIndex(3, 2, 7)]
    random.random(), np.random.rand(), torch.rand(3)
    after = state()
    assert dice[SeededIndex(3, 2, 7)] == first
    with pytest.raises(IndexError):
        DeterministicDataset([], seed=0)[SeededIndex(4, 0, 0)]
    assert state() == after != before
    others = [dice[SeededIndex(3, 2, 8)], dice[SeededIndex(3, 3, 7)]]
    others.append(DeterministicDataset(Dice(), seed=2)[SeededIndex(3, 2, 7)])
    for generator in (1, 2, 3):
        assert len({first[generator], *(item[generator] for item in others)}) == 4
    # Another image at the same position gets the same random numbers.
    assert dice[SeededIndex(4, 2, 7)] == (4, *first[1:])


def test_batches_made_one_by_one_and_at_once():
    items = [SeededIndex(5, 0, 10), SeededIndex(6, 0, 11)]
    alone = DeterministicDataset(Dice(), seed=1)
    assert alone.__getitems__(items) == [alone[item] for item in items]
    at_once = DeterministicDataset(DiceAtOnce(), seed=1).__getitems__(items)
    assert at_once[0] == alone[items[0]]
    assert at_once[1] != alone[items[1]]


def test_seeds_of_neighbouring_steps_have_nothing_in_common():
    throws = []
    for key in [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1)]:
        seed_all(*key)
        throws.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert len({value for throw in throws for value in throw}) == 15


def test_batches_are_the_same_with_and_without_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert run_seed() == 5

    def batches(workers, epoch=0):
        data = data_of(make(tmp_path / f"{workers}-{epoch}", train=6, val=1), augment="three-augment", batch_size=4)
        data.num_workers = workers
        torch.manual_seed(workers)
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.cat([images for images, _ in loader])

    alone = batches(0)
    assert torch.equal(alone, batches(2))
    assert not torch.equal(alone, batches(0, epoch=1))


@pytest.mark.parametrize("count", [1, 2, 5, 23])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_eval_shards_have_every_image_once_in_equally_many_batches(count, world):
    data = NoiseImages(count)
    seen, batches = [], set()
    for rank in range(world):
        data.trainer = SimpleNamespace(world_size=world, global_rank=rank)
        for loader in (data.val_dataloader(), data.test_dataloader()):
            batches.add(len(loader))
            read = list(loader)
            assert len(read) == len(loader)
            for pixels, labels in read:
                assert pixels.shape[1:] == (3, 8, 12)
                assert len(pixels) == len(labels) <= 4
                seen += data.indices(pixels)
                assert labels.tolist() == [int(data.labels[index]) for index in data.indices(pixels)]
    assert sorted(seen) == sorted(2 * list(range(count)))
    assert batches == {math.ceil(math.ceil(count / world) / 4)}
