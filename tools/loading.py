"""How many small images a second the loader gives: `python tools/loading.py`. Random images, so nothing is needed.

From memory as CIFAR-10 is (one by one, and by the batch where the augmentation has such a form), and from class folders
of JPEG files, read each time and with `cache`. Run it on an idle machine; it prints the median of a few epochs, on one
thread and the workers.
"""

import argparse
import os
import statistics
import tempfile
import time

import numpy as np
import torch
from PIL import Image
from relvit.data.loading.memory import (
    BatchTransform,
    InMemoryBatches,
    SameSizeImages,
    batch_transform,
    identity_collate,
    pack,
)
from torch.utils.data import DataLoader, Dataset

from relvit.data import ImageFolderData, train_transform

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images_per_second(loader: DataLoader, epochs: int) -> float:
    """Median over some epochs, without the start of the workers."""
    rates = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def write_folders(root: str, images: np.ndarray) -> None:
    """Ten class folders of train, a JPEG file for each image."""
    for number, image in enumerate(images):
        folder = os.path.join(root, "train", f"class {number % 10}")
        os.makedirs(folder, exist_ok=True)
        Image.fromarray(image).save(os.path.join(folder, f"{number}.jpg"))


class FromMemory:
    """Loaders of images in memory, one by one or, with the transform of a batch, by the batch."""

    def __init__(self, images: np.ndarray, augment: str, batch_size: int, by_batch: BatchTransform | None) -> None:
        self.dataset: Dataset = SameSizeImages(pack(images), [0] * len(images), train_transform(32, MEAN, STD, augment))
        self.form = {"batch_size": batch_size, "shuffle": True}
        if by_batch is not None:
            self.dataset, self.form["collate_fn"] = InMemoryBatches(self.dataset, by_batch), identity_collate

    def loader(self, num_workers: int) -> DataLoader:
        """With so many workers."""
        return DataLoader(self.dataset, num_workers=num_workers, persistent_workers=num_workers > 0, **self.form)


class FromFolders:
    """Training loaders of class folders (a tenth of the images is put aside to validate)."""

    def __init__(self, root: str, augment: str, batch_size: int, cache: bool) -> None:
        sizes = {"img_size": 32, "crop_pct": 1.0, "mean": MEAN, "std": STD}
        self.data = ImageFolderData(root, augment=augment, batch_size=batch_size, cache=cache, **sizes)

    def loader(self, num_workers: int) -> DataLoader:
        """With so many workers."""
        self.data.num_workers = num_workers
        return self.data.train_dataloader()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--augment", nargs="+", default=["none", "crop-flip", "deit"])
    parser.add_argument("--num_workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=20_000, help="images; a tenth of them where they come one by one")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    images = np.random.default_rng(0).integers(0, 256, (options.count, 32, 32, 3)).astype(np.uint8)
    few = images[: options.count // 10]
    with tempfile.TemporaryDirectory() as large, tempfile.TemporaryDirectory() as small:
        write_folders(large, images)
        write_folders(small, few)
        print("augment     images from           workers   images/s")
        for augment in options.augment:
            by_batch = batch_transform((32, 32), (32, 32), MEAN, STD, augment)
            cached = small if by_batch is None else large
            size = options.batch_size
            sources = {"memory, one by one": FromMemory(few, augment, size, None)}
            if by_batch is not None:
                sources["memory, by the batch"] = FromMemory(images, augment, size, by_batch)
            sources["folders"] = FromFolders(small, augment, size, cache=False)
            sources["folders, cached"] = FromFolders(cached, augment, size, cache=True)
            for name, source in sources.items():
                for workers in options.num_workers:
                    rate = images_per_second(source.loader(workers), options.epochs)
                    print(f"{augment:<12}{name:<22}{workers:<10}{rate:,.0f}", flush=True)


if __name__ == "__main__":
    main()
