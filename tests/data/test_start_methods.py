"""Loader workers that share no memory with the run, as Python starts them from 3.14 on, and what they outlive."""

import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver, resource_tracker

import pytest
import torch
from cifar_archive import make_archive
from photos import write_photos
from torchvision.datasets import CIFAR10

from relvit.data import CIFAR10Data, ImageFolderData, ImageListData
from relvit.data.loading.loader import ignore_stop_signals


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a data module of a kind, with options."""

    def build(kind, **options):
        options = {"img_size": 16, "batch_size": 4, "num_workers": 2, **options}
        if kind == "cifar":
            batches = ["data_batch_1", "test_batch"]
            make_archive(monkeypatch, tmp_path, CIFAR10, "labels", batches, CIFAR10Data.classes)
            data = CIFAR10Data(str(tmp_path), **options)
            data.prepare_data()
            return data
        root = write_photos(tmp_path / "photos", splits=("train", "val"), count=3)
        if kind == "folder":
            return ImageFolderData(str(root), **options)
        for split in ("train", "val"):
            rows = [f"{path},{path.parent.name}" for path in sorted((root / split).rglob("*.jpg"))]
            (tmp_path / f"{split}.csv").write_text("\n".join(["path,label", *rows]))
        return ImageListData(train=str(tmp_path / "train.csv"), val=str(tmp_path / "val.csv"), **options)

    return build


CASES = [
    ("folder", "forkserver", {"augment": "deit", "repeats": 2, "on_error": "skip"}),
    ("folder", "spawn", {"augment": "three-augment", "color_jitter": 0.3, "random_erasing": 0.5}),
    ("list", "forkserver", {"augment": "three-augment", "balance": "sampler"}),
    ("list", "forkserver", {"augment": "deit", "on_error": "skip"}),
    ("cifar", "forkserver", {"augment": "deit"}),
    ("cifar", "forkserver", {"augment": "three-augment"}),
    ("cifar", "forkserver", {"augment": "crop-flip", "img_size": 32}),
]


@pytest.mark.parametrize(("kind", "method", "options"), CASES)
def test_workers_started_by_any_method_give_the_same_batches(make, kind, method, options):
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["relvit.cli.fit.trainer", "torch.utils.tensorboard", "tensorboard.backend"])
    data = make(kind, **options)
    expected = list(data.train_dataloader())
    loader = data.train_dataloader()
    loader.multiprocessing_context = context
    found = list(loader)
    assert len(found) == len(expected) > 1
    for (images, labels), (same_images, same_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)


def test_workers_outlive_what_stops_the_run(make):
    """Signals that a batch system sends to every process, also to those that have only just begun."""
    loader = make("folder", augment="none").train_dataloader()
    loader.worker_init_fn = _begin_slowly
    batches = iter(loader)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        for worker in workers:
            os.kill(worker.pid, number)
    # Nine images in fours, and one alone, which is left out.
    assert len(list(batches)) == 2
    assert all(worker.is_alive() for worker in workers)


def test_a_fork_server_and_its_other_children_can_be_told_to_stop(make):
    forkserver._forkserver._stop()
    # Starting it lets these signals through, as often as not before the server starts.
    resource_tracker.ensure_running()
    context = multiprocessing.get_context("forkserver")
    loader = make("folder", augment="none").train_dataloader()
    loader.multiprocessing_context = context
    assert len(list(loader)) == 2
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


def _begin_slowly(worker):
    time.sleep(0.5)
    ignore_stop_signals(worker)


def test_workers_end_with_a_run_that_never_closed_its_loader(make):
    context = multiprocessing.get_context("fork")
    run = context.Process(target=_abandon, args=(make("folder", augment="none"),))
    run.start()
    run.join(60)
    assert run.exitcode == 0


abandoned = []


def _abandon(data):
    # Still referred to when Python ends, as by the traceback of an error.
    abandoned.append(iter(data.train_dataloader()))
    next(abandoned[0])
