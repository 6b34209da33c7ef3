"""Train on a task that needs memory: the class is the XOR of a mark in the first band and a mark in the last.

    python tools/depth/cue.py                        # three seeds with memory and three without, some minutes
    python tools/depth/cue.py --seeds 8 --position tables

Images are noise of 16 x 12 pixels, 4 x 3 patches in four bands of one row. In the first and in the last band one patch
is a mark, brighter or darker than the others; the class is 1 where one is bright and one is dark.
Each patch has its own norm and the model averages tokens before a linear classifier,
so that what bands contribute is added up: without memory no sum of a function of one mark and a function of the other
separates the classes (by luck, up to 75 % of the images). With memory the last band can compare; no gradient flows into
the earlier bands through it.
"""

from __future__ import annotations

import argparse

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import relvit  # noqa: F401  registers the models

ROWS, COLUMNS, PATCH, BATCH = 4, 3, 4, 64


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw images (count, 1, 16, 12) and their classes."""
    patches = 0.3 * torch.randn(count, ROWS, PATCH, COLUMNS, PATCH, generator=generator)
    bright, columns = (torch.randint(0, n, (2, count), generator=generator) for n in (2, COLUMNS))
    for mark, column, row in zip(bright, columns, (0, ROWS - 1), strict=True):
        patches[torch.arange(count), row, :, column] += (2.0 * mark - 1)[:, None, None]
    return patches.reshape(count, 1, ROWS * PATCH, COLUMNS * PATCH), bright[0] ^ bright[1]


def accuracy(seed: int, memory_rows: int | None, position: str, steps: int) -> tuple[float, float]:
    """Train a model; return its accuracy and loss on 2,000 images."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    options = {"img_size": (ROWS * PATCH, COLUMNS * PATCH), "patch_size": PATCH, "embed_dim": 32, "depth": 2}
    options |= {"num_heads": 2, "weight_init": "jax", "rel_init_std": 0.2, "fc_norm": False, "num_classes": 2}
    options |= {"in_chans": 1, "position": position, "band_rows": 1, "memory_rows": memory_rows}
    net = timm.create_model("test_relvit", **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        pixels, labels = images(BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(net(pixels), labels).backward()
        optimizer.step()
        schedule.step()
    pixels, labels = images(2000, generator)
    with torch.inference_mode():
        logits = net.eval()(pixels)
    return float((logits.argmax(-1) == labels).float().mean()), float(F.cross_entropy(logits, labels))


def main() -> None:
    """Print a row for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=800)
    add("--position", default="xl")
    given = parser.parse_args()
    print("| seed | with memory: accuracy, loss | without: accuracy, loss |\n|---|---|---|")
    for seed in range(given.seeds):
        cells = ("{:.1%}, {:.3f}".format(*accuracy(seed, rows, given.position, given.steps)) for rows in (None, 0))
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
