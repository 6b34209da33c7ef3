"""Measure how many small images per second the data loaders return: `python tools/loading.py`, with random images.

The images come from memory, as CIFAR-10's images do (one by one, and by the batch where the augmentation can), and from
class folders of JPEG files, which are read each time or kept by `cache`. The tool prints medians over epochs; run it on
an idle machine.

`--native` measures native shapes instead: files with the aspect ratios of photographs, as sequences of up to this many
tokens (patches of 16 px), beside the same files at one size with as many tokens. It also prints which share of the
tokens is padding, in training and in evaluation.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from relvit.app.data import ImageFolderData, train_transform
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.loading.loader import identity_collate

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images_per_second(loader: DataLoader, epochs: int) -> float:
    """Return the median over epochs; the first epoch starts the workers and does not count."""
    rates = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def write_folders(root: str, images: np.ndarray) -> None:
    """Write ten class folders of train, a JPEG file for each image."""
    for number, image in enumerate(images):
        folder = os.path.join(root, "train", f"class {number % 10}")
        os.makedirs(folder, exist_ok=True)
        Image.fromarray(image).save(os.path.join(folder, f"{number}.jpg"))


def write_shapes(root: str, count: int) -> None:
    """Write two class folders of train and val, with JPEG files that have the shapes of photographs."""
    generator = np.random.default_rng(0)
    aspects = generator.choice([1, 4 / 3, 3 / 2, 16 / 9, 2.5, 4], count, p=[0.1, 0.4, 0.35, 0.1, 0.04, 0.01])
    portrait = generator.random(count) < 0.25
    for number, aspect in enumerate(np.where(portrait, 1 / aspects, aspects) * generator.lognormal(0, 0.05, count)):
        side = 400 * generator.lognormal(0, 0.4)
        folder = os.path.join(root, ("train", "val")[number % 2], "ab"[number // 2 % 2])
        os.makedirs(folder, exist_ok=True)
        size = (max(1, round(side * aspect**0.5)), max(1, round(side / aspect**0.5)))
        colour = tuple(generator.integers(0, 256, 3).tolist())
        Image.new("RGB", size, colour).save(os.path.join(folder, f"{number}.jpg"))


def padding(loader: DataLoader) -> float:
    """Return the share of the tokens of native batches that is padding."""
    valid = [images["patch_valid"] for images, _ in loader]
    return 1 - sum(int(batch.sum()) for batch in valid) / sum(batch.numel() for batch in valid)


def compare_native(budgets: list[int], batch_size: int, workers: list[int], epochs: int) -> None:
    """Print a row for each budget of tokens."""
    with tempfile.TemporaryDirectory() as root:
        write_shapes(root, 2000)
        print("tokens    workers   images/s, native   of one size   padding in training   in evaluation")
        for budget, number in itertools.product(budgets, workers):
            options = {"batch_size": batch_size, "num_workers": number}
            native = ImageFolderData(root, native=True, max_tokens=budget, **options)
            loader = native.train_dataloader()
            one_size = ImageFolderData(root, img_size=native.img_size, **options).train_dataloader()
            rates = f"{images_per_second(loader, epochs):<19,.0f}{images_per_second(one_size, epochs):<14,.0f}"
            shares = f"{padding(loader):<22.1%}{padding(native.val_dataloader()):.1%}"
            print(f"{budget:<10}{number:<10}{rates}{shares}", flush=True)


def sources_of(images: np.ndarray, augment: str, size: int, large: str, small: str) -> dict[str, Callable]:
    """Return functions from a number of workers to a loader; `small` has a tenth of the images in `large`."""
    transform = train_transform(32, MEAN, STD, augment)
    few = images[: len(images) // 10]
    one_by_one = StackedImages(torch.from_numpy(few), [0] * len(few), transform)
    by_batch = StackedImages(torch.from_numpy(images), [0] * len(images), transform).at_once()

    def from_memory(dataset: object, **options: object) -> Callable[[int], DataLoader]:
        options |= {"batch_size": size, "shuffle": True}
        return lambda workers: DataLoader(dataset, num_workers=workers, persistent_workers=workers > 0, **options)

    def from_folders(root: str, cache: bool) -> Callable[[int], DataLoader]:
        options = {"img_size": 32, "crop_pct": 1.0, "mean": MEAN, "std": STD, "cache": cache, "batch_size": size}
        data = ImageFolderData(root, augment=augment, **options)

        def loader(workers: int) -> DataLoader:
            data.num_workers = workers
            return data.train_dataloader()

        return loader

    sources = {"memory, one by one": from_memory(one_by_one)}
    if by_batch is not None:
        sources["memory, by the batch"] = from_memory(by_batch, collate_fn=identity_collate)
    sources["folders"] = from_folders(small, cache=False)
    sources["folders, cached"] = from_folders(small if by_batch is None else large, cache=True)
    return sources


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--augment", nargs="+", default=["none", "crop-flip", "deit"])
    parser.add_argument("--num_workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=20_000, help="images; a tenth of them where they come one by one")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--native", nargs="*", type=int, metavar="TOKENS", help="budgets; by default 64 196 576")
    given = parser.parse_args()

    torch.set_num_threads(1)
    if given.native is not None:
        compare_native(given.native or [64, 196, 576], min(given.batch_size, 64), given.num_workers, given.epochs)
        return
    images = np.random.default_rng(0).integers(0, 256, (given.count, 32, 32, 3)).astype(np.uint8)
    with tempfile.TemporaryDirectory() as large, tempfile.TemporaryDirectory() as small:
        write_folders(large, images)
        write_folders(small, images[: given.count // 10])
        print("augment     images from           workers   images/s")
        for augment in given.augment:
            for name, loader in sources_of(images, augment, given.batch_size, large, small).items():
                for workers in given.num_workers:
                    rate = images_per_second(loader(workers), given.epochs)
                    print(f"{augment:<12}{name:<22}{workers:<10}{rate:,.0f}", flush=True)


if __name__ == "__main__":
    main()
