"""Private attributes of Lightning, such as states of its loaders: no other file of the package uses any.

A new minor version of Lightning may change them. `tests/app/training/test_lightning_internals.py` then fails first. An
exception is `_start_method` of strategies, which `run/processes.py` reads only if it exists.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lightning import Trainer
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher


def validation_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the training batch that was processed last.

    Lightning has no public function that answers this question. The answer depends on `val_check_interval` (batches, a
    part of the epoch, or time), on `check_val_every_n_epoch`, on whether the data have a length, and on early stops.
    """
    # The argument is the data fetcher, which Lightning needs only if the training step itself fetches batches. relvit's
    # training step does not, so pass None.
    return trainer.fit_loop.epoch_loop._should_check_val_fx(None)


class _RecordingFetcher(_PrefetchDataFetcher):
    """Lightning's fetcher of batches, which also keeps the states of loaders before each of the last batches.

    If data have no length, Lightning loads each batch while it still trains on the batch before. An optimiser step may
    also use several batches. In both cases a loader is already further than the batch at which a training has to
    resume.
    """

    def record(self, trainer: Trainer) -> None:
        """Begin to record, and keep the states of the batches of an optimiser step."""
        self.trainer, self.states, self.kept = trainer, {}, trainer.accumulate_grad_batches + 2

    def restore(self, states: list[Any], epoch: int, batch: int) -> None:
        """Iterate over the loaders anew, from their states after this batch of this epoch, if they have states."""
        set_epoch(self.trainer, epoch)
        self.combined_loader._load_state_dicts(deepcopy(states))
        super().__iter__()
        # A loader of litdata that is asked for its state now, before its first batch, forgets the state it has loaded.
        self.states[batch] = states

    def reset(self) -> None:
        super().reset()
        self.states = {}

    def __iter__(self) -> Any:
        stateful = any(self.states.values())
        if stateful and self.done and self.length and self.length == sized_len(self.trainer.train_dataloader):
            # Some loaders, such as litdata's after a resume, have to reach the end of their data before they begin
            # another epoch. Lightning stops at the last batch if a loader has a length, so ask for one more batch.
            next(self.iterator, None)
        states = self.combined_loader._state_dicts()
        set_epoch(self.trainer, self.trainer.current_epoch)
        super().__iter__()
        self.states[0] = deepcopy(states)
        return self

    def __next__(self) -> Any:
        if self.fetched not in self.states and (states := self.combined_loader._state_dicts()):
            # Copy the states, because a loader may change the dictionary that it has returned.
            self.states[self.fetched] = deepcopy(states)
            self.states.pop(self.fetched - self.kept, None)
        return super().__next__()


def record_loaders(trainer: Trainer, states: list[Any], epoch: int, batch: int) -> None:
    """Let the training loop, which has been set up, keep the states that `loader_states` returns.

    If loaders have `states` in a checkpoint, or `set_epoch`, let them begin anew after this batch of this epoch.
    Lightning itself does so only for loaders that are set up when its loops begin, but a schedule needs the number of
    batches, and so the loaders, earlier than that.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if type(fetcher) is not _PrefetchDataFetcher:
        return
    # A new fetcher would need a new iterator, and the loaders would lose the batch that is already loaded.
    fetcher.__class__ = _RecordingFetcher
    fetcher.record(trainer)
    if states or (epoch and set_epoch(trainer, epoch)):
        fetcher.restore(states, epoch, batch)


def set_epoch(trainer: Trainer, epoch: int) -> bool:
    """Tell the epoch to a training dataset that shuffles by it, as a Hugging Face stream does; return if there is one.

    Lightning tells the epoch only to samplers.
    """
    tell = getattr(getattr(trainer.train_dataloader, "dataset", None), "set_epoch", None)
    if callable(tell):
        tell(epoch)
    return callable(tell)


def loader_states(trainer: Trainer, batch: int) -> list[Any] | None:
    """Return the states of the training loaders after this number of batches of the epoch; None: none are recorded."""
    return getattr(trainer.fit_loop._data_fetcher, "states", {}).get(batch)


def data_ended(trainer: Trainer) -> bool:
    """Return whether the training data have no further batch in this epoch."""
    return trainer.fit_loop._data_fetcher.done


def validates_by_clock(trainer: Trainer) -> bool:
    """Return whether `val_check_interval` is a time and not a number of batches or a part of an epoch."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def syncs_batch_norm(trainer: Trainer) -> bool:
    """Return whether Lightning will replace the batch norms of the model by PyTorch's `SyncBatchNorm`."""
    return getattr(trainer.strategy, "_layer_sync", None) is not None
