"""How many small images a second the loader gives: `python tools/loading.py`. Random images, so nothing is needed.

Run it on an idle machine; it prints the median of a few epochs, on one thread and the workers.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from relvit.data import train_transform
from relvit.data.memory import MemoryImages, WholeBatches, as_it_is, batch_transform, pack

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images_per_second(dataset: Dataset, batch_size: int, num_workers: int, epochs: int, form: dict[str, Any]) -> float:
    """Median over some epochs, without the start of the workers."""
    loader = DataLoader(
        dataset, batch_size, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0, **form
    )
    rates = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--augment", nargs="+", default=["none", "crop-flip", "deit"])
    parser.add_argument("--num_workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=20_000, help="images; a tenth of them one by one")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    pixels = pack(np.random.default_rng(0).integers(0, 256, (options.count, 32, 32, 3)).astype(np.uint8))
    print("augment     by          workers   images/s")
    for augment in options.augment:
        by_batch = batch_transform((32, 32), (32, 32), MEAN, STD, augment)
        transform = train_transform(32, MEAN, STD, augment)
        for name in ("the image",) if by_batch is None else ("the image", "the batch"):
            count = options.count // 10 if name == "the image" else options.count
            dataset = MemoryImages(pixels[:count], [0] * count, transform)
            form = {}
            if name == "the batch":
                dataset, form = WholeBatches(dataset, by_batch), {"collate_fn": as_it_is}
            for workers in options.num_workers:
                rate = images_per_second(dataset, options.batch_size, workers, options.epochs, form)
                print(f"{augment:<12}{name:<12}{workers:<10}{rate:,.0f}", flush=True)


if __name__ == "__main__":
    main()
