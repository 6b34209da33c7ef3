"""CIFAR10Data and CIFAR100Data read small archives in the format of CIFAR's authors."""

import tarfile

import numpy as np
import pytest
import torch
from cifar_archive import make_archive
from torchvision.datasets import CIFAR10, CIFAR100

from relvit.app.data import CIFAR10Data, CIFAR100Data
from relvit.app.data.images.image_cache import InMemoryBatches


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    batches = ["data_batch_1", "data_batch_2", "data_batch_3", "test_batch"]
    return make_archive(monkeypatch, tmp_path, CIFAR10, "labels", batches, list(CIFAR10Data.classes))


def data_of(root, **options):
    data = CIFAR10Data(str(root), download=False, num_workers=0, **options)
    data.prepare_data()
    return data


def to_uint8(image, data):
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    return ((image * std + mean) * 255).round().to(torch.uint8).numpy()


def test_images_and_labels_of_every_split(cifar10, tmp_path):
    data = data_of(tmp_path, augment="none")
    data.setup()
    train_images = np.concatenate([cifar10[f"data_batch_{i}"][0] for i in (1, 2, 3)])
    train_labels = np.concatenate([cifar10[f"data_batch_{i}"][1] for i in (1, 2, 3)])
    known = {image.tobytes(): index for index, image in enumerate(train_images)}
    found = {}
    for split in ("train", "val"):
        found[split] = []
        for image, label in data.dataset(split):
            index = known[to_uint8(image, data).tobytes()]
            assert label == train_labels[index]
            found[split].append(index)
    assert sorted(found["train"] + found["val"]) == list(range(60))
    assert data.held_out() == [(f"cifar10/train/{i:05d}", train_labels[i]) for i in found["val"]]
    # Each class holds out round(6 * 0.1) images, but at least 1.
    assert np.bincount(data.dataset("val").targets).tolist() == [1] * 10
    assert isinstance(data.test_dataloader().dataset.dataset, InMemoryBatches)
    images, labels = next(iter(data.test_dataloader()))
    assert [to_uint8(image, data).tobytes() for image in images] == [i.tobytes() for i in cifar10["test_batch"][0]]
    assert labels.tolist() == cifar10["test_batch"][1]
    names = [name for _, batch in data.predict_dataloader() for name in batch]
    assert names == [f"cifar10/test/{i:05d}" for i in range(20)]


def test_cifar100_has_fine_labels(tmp_path, monkeypatch):
    stored = make_archive(monkeypatch, tmp_path, CIFAR100, "fine_labels", ["train", "test"], list(CIFAR100Data.classes))
    data = CIFAR100Data(str(tmp_path), num_workers=0)
    data.prepare_data()
    assert (data.num_classes, data.class_names[0], data.class_names[99]) == (100, "apple", "worm")
    assert data.class_names == sorted(data.class_names)
    assert [label for _, label in data.dataset("test")] == stored["test"][1]
    assert data.mean != CIFAR10Data().mean


def test_damaged_files_are_unpacked_again_or_named(cifar10, tmp_path):
    """torchvision compares MD5 sums before it unpickles a file."""
    data_of(tmp_path)
    folder, archive = tmp_path / CIFAR10.base_folder, tmp_path / CIFAR10.filename
    (folder / "test_batch").write_bytes(b"damaged")
    assert len(data_of(tmp_path).dataset("test")) == 20
    file = folder / "data_batch_2"
    file.write_bytes(file.read_bytes()[:-7] + b"damaged")
    archive.write_bytes(archive.read_bytes()[:-10])
    for attempt in (data_of, lambda root: CIFAR10Data(str(root)).dataset("test")):
        with pytest.raises(
            ValueError, match=r"batches-py is missing or is damaged: its MD5 sum is not that of CIFAR-10"
        ):
            attempt(tmp_path)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz is damaged.*delete it"):
        data_of(tmp_path)
    archive.unlink()
    with pytest.raises(ValueError, match=r"no CIFAR-10 in .*: set download .*https://www.cs.toronto.edu"):
        data_of(tmp_path)
    with pytest.raises(ValueError, match=r"no CIFAR-10 in .*: call prepare_data"):
        CIFAR10Data(str(tmp_path)).dataset("train")


def test_a_damaged_or_missing_list_of_classes_is_named(cifar10, tmp_path):
    data_of(tmp_path)
    meta = tmp_path / CIFAR10.base_folder / CIFAR10.meta["filename"]
    for spoil in (lambda: meta.write_bytes(b"damaged"), meta.unlink):
        spoil()
        with pytest.raises(ValueError, match=r"a file in .*cifar-10-batches-py is missing or is damaged.*; delete"):
            data_of(tmp_path)


def test_download_is_torchvisions(cifar10, tmp_path, monkeypatch):
    """torchvision downloads once, from the published address; afterwards the files are present."""
    archive = tmp_path / CIFAR10.filename
    elsewhere = archive.rename(tmp_path / "elsewhere")
    asked = []

    def download(url, root, filename, md5):
        asked.append((url, filename, md5))
        elsewhere.rename(archive)
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", download)
    for _ in range(2):
        CIFAR10Data(str(tmp_path), download=True).prepare_data()
    assert asked == [(CIFAR10.url, CIFAR10.filename, CIFAR10.tgz_md5)]


def test_which_images_are_put_aside_and_class_names(cifar10, tmp_path):
    data = data_of(tmp_path, split_seed=3)
    assert data_of(tmp_path, split_seed=3, repeats=2).held_out() == data.held_out()
    assert data_of(tmp_path, split_seed=4).held_out() != data.held_out()
    with pytest.raises(ValueError, match="class_names is 'cat', 'dog'; CIFAR-10 has the classes 'airplane'"):
        CIFAR10Data(class_names=["cat", "dog"])
