"""Small archives in the format of CIFAR's authors, with other images."""

import hashlib
import pickle
import tarfile

import numpy as np

PER_BATCH = 20


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def make_archive(monkeypatch, folder, dataset_class, labels_key, batches, names):
    """Write an archive, and give torchvision its MD5 sums; return images and labels by file."""
    generator = np.random.default_rng(0)
    base = folder / "made" / dataset_class.base_folder
    base.mkdir(parents=True)
    stored = {}
    for file in batches:
        labels = (np.arange(PER_BATCH) % len(names)).tolist()
        images = generator.integers(0, 256, (PER_BATCH, 3, 32, 32)).astype(np.uint8)
        stored[file] = (images, labels)
        (base / file).write_bytes(pickle.dumps({"data": images.reshape(PER_BATCH, -1), labels_key: labels}, protocol=2))
    meta = dataset_class.meta
    (base / meta["filename"]).write_bytes(pickle.dumps({meta["key"]: names}, protocol=2))
    archive = folder / dataset_class.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base, arcname=dataset_class.base_folder)
    monkeypatch.setattr(dataset_class, "train_list", [[f, md5(base / f)] for f in batches[:-1]])
    monkeypatch.setattr(dataset_class, "test_list", [[f, md5(base / f)] for f in batches[-1:]])
    monkeypatch.setattr(dataset_class, "meta", {**meta, "md5": md5(base / meta["filename"])})
    monkeypatch.setattr(dataset_class, "tgz_md5", md5(archive))
    return stored
