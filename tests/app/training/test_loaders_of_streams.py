"""Training loaders without a length, such as streams, and loaders with a state: schedule, checkpoints, resume."""

import itertools
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_training import Noise, Record, assert_close, build, record_steps, train
from torch.utils.data import DataLoader, IterableDataset

from relvit.app.training import RunCheckpoints


class Streamed(IterableDataset):
    """The images of `Noise`, one after the other."""

    def __iter__(self):
        data = Noise()
        return zip(data.images, data.labels, strict=True)


class NoLength(Noise):
    """Six batches in each epoch, the last one smaller, whose number only shows when they are used up."""

    def train_dataloader(self):
        return DataLoader(Streamed(), batch_size=4)


class Pipeline(IterableDataset):
    """A loader that is a dataset, too, as webdataset's `WebLoader` is."""

    def __iter__(self):
        return iter(DataLoader(Streamed(), batch_size=4))


class Stateful:
    """A loader of six batches that goes on after the batch of its state, as torchdata's `StatefulDataLoader` does."""

    batch_size = 4

    def __init__(self):
        self.done = self.first = 0

    def __len__(self):
        return 6

    def __iter__(self):
        self.done, self.first = self.first, 0
        return self.batches(self.done)

    def batches(self, first):
        for batch in itertools.islice(Noise().train_dataloader(), first, None):
            self.done += 1
            yield batch

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.first = state["done"] % 6


class WithState(Noise):
    def train_dataloader(self):
        return Stateful()


class Unsized(Stateful):
    """Such a loader without a length; Lightning loads each of its batches while the batch before is trained on."""

    def __len__(self):
        raise TypeError("no length")


class WithoutLength(Noise):
    def train_dataloader(self):
        return Unsized()


class Shuffled(IterableDataset):
    """Images in an order that depends on the epoch, as in a shuffled stream of Hugging Face datasets."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        data = Noise()
        order = torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return ((data.images[index], data.labels[index]) for index in order)


class ByEpoch(Unsized):
    """A loader of `Shuffled` whose state, as of a Hugging Face stream, has an effect in its own epoch alone."""

    def __init__(self):
        super().__init__()
        self.dataset, self.loaded = Shuffled(), {}

    def __iter__(self):
        self.done = self.loaded.get("done", 0) if self.loaded.get("epoch") == self.dataset.epoch else 0
        for batch in itertools.islice(DataLoader(self.dataset, batch_size=4), self.done, None):
            self.done += 1
            yield batch

    def state_dict(self):
        return {"done": self.done, "epoch": self.dataset.epoch}

    def load_state_dict(self, state):
        self.loaded = state


class Counting(Stateful):
    """A loader that counts its epochs as litdata's `StreamingDataLoader` does: it has to reach the end of its data.

    If it is asked for its state between `load_state_dict` and its first batch, it forgets the order of the epoch.
    """

    def __init__(self):
        super().__init__()
        self.epoch, self.order, self.loaded, self.restore = 0, 1, None, False

    def __iter__(self):
        if not self.restore:
            self.done, self.loaded = 0, None
            self.epoch += 1
        self.order = self.epoch if self.loaded is None else self.loaded["order"]
        dataset = Shuffled()
        dataset.set_epoch(self.order)
        for batch in itertools.islice(DataLoader(dataset, batch_size=4), self.done, None):
            self.done += 1
            yield batch
        self.restore = False

    def state_dict(self):
        state = {"done": self.done, "epoch": self.epoch, "order": self.order}
        if self.loaded is not None:
            self.loaded.update(state)
        return state

    def load_state_dict(self, state):
        self.done, self.epoch, self.loaded, self.restore = state["done"], state["epoch"], state, 0 < state["done"] < 6


class ShuffledStream(Noise):
    def train_dataloader(self):
        return DataLoader(Shuffled(), batch_size=4)


class StreamByEpoch(Noise):
    def train_dataloader(self):
        return ByEpoch()


class CountedEpochs(Noise):
    def train_dataloader(self):
        return Counting()


def classifier():
    return build(warmup_epochs=0, ema_decay=0.5)


def save(folder):
    """Return callbacks that write a checkpoint at each validation, as best.ckpt is written, and at each epoch's end."""

    def on_validation_end(trainer, _):
        trainer.save_checkpoint(folder / f"validated {trainer.global_step}.ckpt")

    def on_train_epoch_end(trainer, _):
        trainer.save_checkpoint(folder / f"epoch {trainer.global_step}.ckpt")

    return [LambdaCallback(on_validation_end=on_validation_end, on_train_epoch_end=on_train_epoch_end)]


def save_steps(folder):
    """Return a callback that writes a checkpoint after each batch."""

    def on_train_batch_end(trainer, *_):
        trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    return [LambdaCallback(on_train_batch_end=on_train_batch_end)]


def test_epochs_of_unknown_length_have_no_schedule():
    """All steps would have the rate `min_lr`, since Lightning takes the number of steps as -1."""
    with pytest.raises(ValueError, match=r"give --trainer.max_steps and warmup_epochs 0, or --.*train_bat"):
        train(classifier(), NoLength(), max_epochs=2)
    with pytest.raises(ValueError, match=r"warmup_epochs 1 .*: give warmup_epochs 0, or --trainer.limit_train_batches"):
        train(build(warmup_epochs=1), NoLength(), max_steps=9)
    module = build(warmup_epochs=1)
    record = Record(module)
    train(module, NoLength(), max_epochs=2, limit_train_batches=4)
    assert [round(rate * 1e3, 2) for rate in record.rates[:5]] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_stream_that_is_shorter_than_its_limit_warns():
    with pytest.warns(UserWarning, match=r"ended after 6 of 9 batches .* give --trainer.limit_train_batches 6"):
        train(build(warmup_epochs=0), NoLength(), max_epochs=2, limit_train_batches=9)


@pytest.mark.parametrize("options", [{"limit_train_batches": 6}, {"limit_train_batches": 9, "max_steps": 5}])
def test_a_stream_that_is_long_enough_does_not(options):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*training data ended")
        train(build(warmup_epochs=0), NoLength(), **{"max_epochs": 2} | options)


def test_a_training_without_a_length_goes_on_as_without_a_break(tmp_path):
    # The second step of each epoch has two batches.
    options = {"max_steps": 4, "accumulate_grad_batches": 4}
    whole = classifier()
    train(whole, NoLength(), **options, callbacks=save(tmp_path))
    for name in ("validated 2", "epoch 2"):
        resumed, batches = classifier(), []
        record_steps(resumed, lambda _, index, batches=batches: batches.append(index))
        train(resumed, NoLength(), tmp_path / f"{name}.ckpt", **options)
        assert batches == [*range(6)]
        assert_close(resumed.state_dict(), whole.state_dict())
        assert_close(resumed.average.net.state_dict(), whole.average.net.state_dict())


def test_the_last_whole_epoch_of_a_stream_has_its_checkpoint(tmp_path):
    train(classifier(), NoLength(), max_steps=8, enable_checkpointing=True, callbacks=[RunCheckpoints(tmp_path)])
    points = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("epoch", "last")]
    assert [point["global_step"] for point in points] == [6, 8]


def test_a_stream_that_begins_again_within_an_epoch_warns(tmp_path):
    train(classifier(), NoLength(), max_steps=8, callbacks=save_steps(tmp_path))
    with pytest.warns(UserWarning, match="the training loader, DataLoader, begins with its first images again"):
        train(classifier(), NoLength(), tmp_path / "2.ckpt", max_steps=8)


def test_a_loader_with_a_state_goes_on_after_the_last_batch(tmp_path):
    """Lightning restores the state too late, since the schedule needs the length of the loader before."""
    whole = classifier()
    train(whole, WithState(), max_epochs=2, callbacks=save_steps(tmp_path))
    for step in (2, 8):
        resumed = classifier()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*begins with its first images again")
            train(resumed, WithState(), tmp_path / f"{step}.ckpt", max_epochs=2)
        assert_close(resumed.state_dict(), whole.state_dict())


def test_a_stream_that_shuffles_by_epoch_has_another_order_in_each(tmp_path):
    whole, first = classifier(), []
    record_steps(whole, lambda batch, index: first.append(batch[1].tolist()) if index == 0 else None)
    train(whole, ShuffledStream(), max_steps=18, callbacks=save(tmp_path))
    assert len(first) == 3
    assert first[0] != first[1] != first[2] != first[0]
    resumed = classifier()
    train(resumed, ShuffledStream(), tmp_path / "epoch 6.ckpt", max_steps=18)
    assert_close(resumed.state_dict(), whole.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("data", [WithState, WithoutLength, StreamByEpoch, CountedEpochs])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loader_with_a_state_loses_no_batch(data, accumulated, tmp_path):
    """Neither the batch that is loaded ahead, nor batches that no optimiser step has used."""

    def on_train_batch_end(trainer, *_):
        progress = trainer.fit_loop.epoch_loop.batch_progress
        trainer.save_checkpoint(tmp_path / f"{progress.total.ready}.ckpt")

    whole, options = classifier(), {"max_steps": 12 // accumulated, "accumulate_grad_batches": accumulated}
    train(whole, data(), **options, callbacks=[LambdaCallback(on_train_batch_end=on_train_batch_end)])
    for batch in (1, 3, 6, 7):
        resumed = classifier()
        train(resumed, data(), tmp_path / f"{batch}.ckpt", **options)
        assert_close(resumed.state_dict(), whole.state_dict())


def test_a_pipeline_needs_a_batch_size():
    class Pipelines(Noise):
        def train_dataloader(self):
            return Pipeline()

    with pytest.raises(ValueError, match="the training loader, Pipeline, does not say its batch_size: give it the att"):
        train(classifier(), Pipelines(), max_steps=2)
