"""Compare the throughput of training at several sizes with that of one size, in tokens per second.

    python tools/train_sizes.py            # relvit_tiny at patch 4 and the sizes of tools/study/study.py

Steps of both kinds take turns in blocks with as many steps as there are sizes; the loading of images, forward and
backward pass and the optimiser count. Printed are the medians over the blocks, and the median of their ratios.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import timm
import torch
import torch.nn.functional as F
from loading import write_folders
from torch import Tensor, nn

import relvit  # noqa: F401  registers the models
from relvit.data import ImageFolderData

SIZE, PATCH, BATCH = 32, 4, 128
SIZES = (20, 24, 28, 32, 36, 40, 44)


def batches(data: ImageFolderData) -> Iterator[tuple[Tensor, Tensor]]:
    """Repeat the epochs of a data module without end."""
    for epoch in itertools.count():
        data.begin_at(epoch, 0)
        yield from data.train_dataloader()


def tokens_per_second(net: nn.Module, optimizer: torch.optim.Optimizer, source: Iterator, steps: int) -> float:
    """Train for some steps."""
    tokens, begin = 0, time.perf_counter()
    for _ in range(steps):
        images, labels = next(source)
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += len(images) * images[0, 0].numel() // PATCH**2
    return tokens / (time.perf_counter() - begin)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    given = parser.parse_args()
    net = timm.create_model("relvit_tiny", img_size=SIZE, patch_size=PATCH, embed_dim=128, depth=4, num_heads=4)
    optimizer = torch.optim.AdamW(net.parameters())
    with tempfile.TemporaryDirectory() as root:
        write_folders(root, np.random.default_rng(0).integers(0, 256, (2000, SIZE, SIZE, 3)).astype(np.uint8))
        options = {"img_size": SIZE, "batch_size": BATCH, "augment": "crop-flip", "cache": True, "num_workers": 0}
        kinds = {"one": None, "several": list(SIZES)}
        sources = {kind: batches(ImageFolderData(root, train_sizes=sizes, **options)) for kind, sizes in kinds.items()}
        for source in sources.values():  # the first block warms up
            tokens_per_second(net, optimizer, source, len(SIZES))
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(given.blocks):
            for kind, source in sources.items():
                found[kind].append(tokens_per_second(net, optimizer, source, len(SIZES)))
    ratios = [several / one for one, several in zip(found["one"], found["several"], strict=True)]
    for kind, values in found.items():
        print(f"{kind}: {median(values):.0f} tokens/s")
    print(f"several / one: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} blocks)")


if __name__ == "__main__":
    main()
