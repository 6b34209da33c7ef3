"""What an image becomes in training follows from seed, epoch and place alone."""

import random

import numpy as np
import pytest
import torch
from grey_folders import data_of, make
from torch.utils.data import Dataset

from relvit.data.loading.deterministic import DeterministicDataset, SeededIndex
from relvit.utils.seeding import run_seed, seed_all


class Dice(Dataset):
    """Items are an index and one throw of each generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), float(torch.rand(()))


class DiceAtOnce(Dice):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_items_follow_from_seed_epoch_and_place_and_leave_no_trace():
    before, dice = state(), DeterministicDataset(Dice(), seed=1)
    first = dice[SeededIndex(3, 2, 7)]
    random.random(), np.random.rand(), torch.rand(3)
    after = state()
    assert dice[SeededIndex(3, 2, 7)] == first
    assert state() == after != before
    others = [
        dice[SeededIndex(3, 2, 8)],
        dice[SeededIndex(3, 3, 7)],
        DeterministicDataset(Dice(), seed=2)[SeededIndex(3, 2, 7)],
    ]
    assert [item[0] for item in others] == [3, 3, 3]
    for generator in (1, 2, 3):
        assert len({first[generator], *(item[generator] for item in others)}) == 4
    # Another image at the same place has the same luck.
    assert dice[SeededIndex(4, 2, 7)] == (4, *first[1:])


def test_batches_made_one_by_one_and_at_once():
    draws = [SeededIndex(5, 0, 10), SeededIndex(6, 0, 11)]
    alone = DeterministicDataset(Dice(), seed=1)
    assert alone.__getitems__(draws) == [alone[draw] for draw in draws]
    at_once = DeterministicDataset(DiceAtOnce(), seed=1).__getitems__(draws)
    assert at_once[0] == alone[draws[0]]
    assert at_once[1] != alone[draws[1]]


def test_an_error_inside_puts_the_generators_back():
    before = state()
    with pytest.raises(IndexError):
        DeterministicDataset([], seed=0)[SeededIndex(4, 0, 0)]
    assert state() == before


def test_seeds_of_neighbouring_steps_have_nothing_in_common():
    throws = []
    for key in [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1)]:
        seed_all(*key)
        throws.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert len({value for throw in throws for value in throw}) == 15
    seed_all(0, 0, 0, 0)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == throws[0]


@pytest.mark.parametrize("augment", ["resized-crop", "deit", "three-augment"])
def test_batches_are_the_same_with_and_without_workers(tmp_path, monkeypatch, augment):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert run_seed() == 5

    def batches(workers, epoch=0):
        data = data_of(make(tmp_path / f"{workers}-{epoch}", train=6, val=1), augment=augment, batch_size=4)
        data.num_workers = workers
        torch.manual_seed(workers)
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.cat([images for images, _ in loader])

    alone = batches(0)
    assert torch.equal(alone, batches(2))
    assert not torch.equal(alone, batches(0, epoch=1))


def test_a_training_that_goes_on_begins_with_the_first_batch_that_is_left(tmp_path):
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
    for (images, labels), (wanted, names) in zip(rest, epochs[1][2:], strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(labels, names)
    loader.sampler.set_epoch(2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(loader, epochs[2], strict=True))
