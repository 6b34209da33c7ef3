"""DataLoader workers: the same batches with every start method, and workers survive signals that stop the run."""

import gc
import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver, resource_tracker

import pytest
import torch
from cifar_archive import make_archive
from photos import write_photos
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10

from relvit.app.data import CIFAR10Data, ImageFolderData
from relvit.app.data.loading.loader import SignalSafeDataLoader, ignore_stop_signals


@pytest.fixture
def folder(tmp_path):
    root = write_photos(tmp_path / "photos", splits=("train", "val"), count=3)
    return lambda **options: ImageFolderData(str(root), **{"img_size": 16, "batch_size": 4, "num_workers": 2} | options)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    make_archive(monkeypatch, tmp_path, CIFAR10, "labels", ["data_batch_1", "test_batch"], CIFAR10Data.classes)
    data = CIFAR10Data(str(tmp_path), batch_size=4, num_workers=2)
    data.prepare_data()
    return data


@pytest.mark.slow
def test_workers_of_a_fork_server_give_the_same_batches(folder, cifar):
    """Python 3.14 starts workers by a fork server by default, so workers share no memory with the run."""
    forkserver._forkserver._stop()
    # Start the resource tracker first, because starting it later would unblock the stop signals.
    resource_tracker.ensure_running()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["relvit.app.cli.fit.fit", "torch.utils.tensorboard", "tensorboard.backend"])
    files = folder(augment="deit", repeats=2, on_error="skip", color_jitter=0.3, random_erasing=0.5)
    for data in (files, cifar):
        expected = list(data.train_dataloader())
        loader = data.train_dataloader()
        loader.multiprocessing_context = context
        found = list(loader)
        assert len(found) == len(expected) > 1
        for (images, labels), (same_images, same_labels) in zip(found, expected, strict=True):
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)
    # The server does not block signals for its other children.
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


class Frozen(Dataset):
    """A dataset whose item is the number of objects that are frozen in the process (`gc.freeze`)."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return gc.get_freeze_count()


def test_a_forked_worker_does_not_free_what_it_inherits():
    """If a worker freed an inherited onnxruntime session, it would wait for ever for threads of the main process."""
    gc.unfreeze()
    (found,) = SignalSafeDataLoader(Frozen(), num_workers=1, multiprocessing_context="fork")
    assert found.item() > 0 == gc.get_freeze_count()
    assert gc.isenabled()


def test_what_a_user_has_frozen_stays_frozen_and_nothing_else_is():
    gc.freeze()
    before = gc.get_freeze_count()
    (_,) = SignalSafeDataLoader(Frozen(), num_workers=1, multiprocessing_context="fork")
    # The count may fall, because frozen objects that are no longer used are freed.
    assert before / 2 < gc.get_freeze_count() <= before


def test_workers_outlive_signals_that_stop_the_run(folder):
    """Batch systems send stop signals to every process, also to workers that have just started."""
    loader = folder(augment="none").train_dataloader()
    loader.worker_init_fn = _begin_slowly
    # Workers of an earlier test may still be running, if an error in that test holds their loader.
    before = multiprocessing.active_children()
    batches = iter(loader)
    workers = [worker for worker in multiprocessing.active_children() if worker not in before]
    assert len(workers) == 2
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        for worker in workers:
            os.kill(worker.pid, number)
    # Nine images make two batches of four; the last image is left out.
    assert len(list(batches)) == 2
    assert all(worker.is_alive() for worker in workers)


def _begin_slowly(worker):
    time.sleep(0.2)
    ignore_stop_signals(worker)


def test_workers_end_with_a_run_that_never_closed_its_loader(folder, monkeypatch):
    monkeypatch.setattr("relvit.app.data.loading.loader.PATIENCE", 0.1)
    run = multiprocessing.get_context("fork").Process(target=_abandon, args=(folder(augment="none"),))
    run.start()
    run.join(60)
    assert run.exitcode == 0


abandoned = []


def _abandon(data):
    # Keep a reference to the iterator until Python ends, as the traceback of an error would.
    abandoned.append(iter(data.train_dataloader()))
    next(abandoned[0])
