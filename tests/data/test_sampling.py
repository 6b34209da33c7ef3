"""Balanced, repeated and divided orders, counted."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grey_folders import GREY, data_of, make
from lightning import LightningModule, Trainer
from sklearn.utils.class_weight import compute_class_weight

from relvit.data import TrainSampler
from relvit.data.loading.sampler import class_weights


def images(sampler):
    """Which images, in order."""
    return [draw.index for draw in sampler]


LABELS = [0] * 90 + [1] * 9 + [2]


def test_class_weights_are_scikit_learns_balanced():
    weights = class_weights(LABELS, 3)
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    torch.testing.assert_close(weights.double(), torch.from_numpy(wanted), rtol=1e-6, atol=0)
    assert weights.dtype == torch.float32
    assert weights[torch.tensor(LABELS)].mean() == pytest.approx(1)
    assert class_weights([0, 2], 3)[1] == 0


def test_every_image_once():
    order = images(TrainSampler(100))
    assert sorted(order) == list(range(100))
    assert order != sorted(order)


def test_weights_draw_classes_equally():
    sampler = TrainSampler(100, class_weights(LABELS, 3)[torch.tensor(LABELS)])
    counts = Counter()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        order = images(sampler)
        assert len(order) == 100
        counts.update(LABELS[i] for i in order)
    # 3,000 draws of probability 1/3: deviation 26
    assert [counts[c] for c in range(3)] == pytest.approx([1000] * 3, abs=100)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("count", [7, 30, 2])
def test_copies_and_processes(replicas, repeats, count):
    """All processes together have what one alone would have, dealt in turn; copies follow one another in it."""
    parts = [images(TrainSampler(count, None, repeats, replicas, rank, seed=4)) for rank in range(replicas)]
    length = -(-count // replicas)
    assert (
        [len(part) for part in parts] == [length] * replicas == [len(TrainSampler(count, None, 1, replicas))] * replicas
    )
    dealt = [index for step in zip(*parts, strict=True) for index in step]
    distinct = dealt[::repeats]
    assert dealt == [image for image in distinct for _ in range(repeats)][: len(dealt)]
    assert set(Counter(distinct[:count]).values()) == {1}
    if repeats == 1:
        assert set(dealt) == set(range(count))
    if repeats == replicas == 3 and count == 30:
        assert [set(parts[0]) == set(part) for part in parts] == [True] * 3  # each copy on a device of its own


def test_order_follows_seed_and_epoch_alone():
    def order(**kwargs):
        torch.manual_seed(np.random.randint(1000))
        return images(TrainSampler(50, repeats=2, **kwargs))

    assert order(seed=1) == order(seed=1)
    assert order(seed=1) != order(seed=2)
    assert order(seed=1, epoch=0) != order(seed=1, epoch=1)
    sampler = TrainSampler(50, repeats=2, seed=1)
    sampler.set_epoch(1)
    assert images(sampler) == order(seed=1, epoch=1)


def unequal(tmp_path, **options):
    return data_of(make(tmp_path, train={"ant": 30, "bee": 10, "cat": 2}, val=1), batch_size=7, **options)


def test_balance_of_a_folder(tmp_path):
    data = unequal(tmp_path, balance="sampler")
    counts = Counter()
    for epoch in range(20):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for pixels, labels in loader:
            counts.update(labels.tolist())
            assert [GREY[data.class_names[label]] for label in labels] == (pixels[:, 0, 0, 0] * 255).round().tolist()
    assert [counts[c] for c in range(3)] == pytest.approx([280] * 3, abs=60)
    assert data.class_weights is None
    assert sorted(Counter(torch.cat([y for _, y in data.val_dataloader()]).tolist()).values()) == [1, 1, 1]


def test_class_weights_of_a_folder(tmp_path):
    data = unequal(tmp_path, balance="loss")
    torch.testing.assert_close(data.class_weights, torch.tensor([42 / 90, 42 / 30, 42 / 6]))
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 42
    assert unequal(tmp_path / "b").class_weights is None


def test_repeats_of_a_folder(tmp_path):
    data = unequal(tmp_path, repeats=3)
    data.train_transform = lambda image: torch.zeros(1)
    order = images(data.train_dataloader().sampler)
    assert len(order) == 42
    assert set(Counter(order).values()) == {3}
    assert data.init_args()["repeats"] == 3


def test_a_last_batch_of_one_is_left_out(tmp_path):
    data = data_of(make(tmp_path, train=5, val=1), batch_size=7, repeats=2)
    assert [len(labels) for _, labels in data.train_dataloader()] == [7, 7]


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
    assert connector._requires_distributed_sampler(unequal(tmp_path / "b").train_dataloader()) is False


class Listener(LightningModule):
    """Keeps the labels of each epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.seen.setdefault(self.current_epoch, []).extend(batch[1].tolist())
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_resumed_training_goes_on_with_the_next_epochs_order(tmp_path):
    def fit(epochs, ckpt_path=None):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        module = Listener()
        trainer.fit(module, datamodule=unequal(tmp_path / "photos", balance="sampler"), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.seen

    whole, first = fit(3), fit(1)
    resumed = fit(3, tmp_path / "1.ckpt")
    assert first == {0: whole[0]}
    assert resumed == {1: whole[1], 2: whole[2]}
    assert whole[0] != whole[1] != whole[2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"balance": "samplr"}, r"balance is 'samplr'; allowed are 'none', 'sampler', 'loss' \(did you mean 'sampler'"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_wrong_arguments(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        unequal(tmp_path, **wrong)
