"""Train segmentation with a small decode head on features, test at other sizes and shifts: `python tools/segment.py`.

The images are synthetic: digits of scikit-learn at random places of a noisy canvas, each pixel labelled with its digit
or as background. Models train at 48 x 48 px, then see canvases of other sizes and shapes with as many digits per area,
so that objects keep their scale. The tool prints the mean intersection over union of the classes, and how well features
at the same place agree in two views that are shifted by whole patches (cosine, 1 is best). docs/dense.md has the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex

import relvit  # noqa: F401 (registers its models with timm)

CLASSES, BACKGROUND = 11, 10
DIGIT, PATCH = 16, 4  # Both are in pixels on a side.
TRAINED = (48, 48)
SIZES = (TRAINED, (48, 96), (96, 96), (144, 144))
SHIFT = (2, 3)  # The shift is in rows and columns of patches.
SHAPE = {"patch_size": PATCH, "embed_dim": 64, "depth": 4, "num_heads": 4, "in_chans": 1, "img_size": TRAINED}
MODELS = {
    "relvit_tiny": SHAPE | {"max_distance": 3},
    "vit_tiny_patch16_224": SHAPE | {"class_token": False, "global_pool": "avg", "dynamic_img_size": True},
}


class Canvas:
    """Maker of canvases with digits of scikit-learn: the first 1,400 digits to train, the others to test."""

    def __init__(self, train: bool, seed: int) -> None:
        digits = load_digits()
        part = slice(None, 1400) if train else slice(1400, None)
        self.images = np.kron(digits.images[part] / 16, np.ones((DIGIT // 8, DIGIT // 8))).astype(np.float32)
        self.targets = digits.target[part]
        self.random = np.random.default_rng(seed)

    def __call__(self, count: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return images (count, 1, H, W) around 0 and labels (count, H, W)."""
        images = self.random.normal(0.25, 0.15, (count, 1, *size)).astype(np.float32)
        labels = np.full((count, *size), BACKGROUND)
        per_canvas = 4 * size[0] * size[1] // (TRAINED[0] * TRAINED[1])
        for image, label in zip(images, labels, strict=True):
            for digit in self.random.integers(len(self.images), size=per_canvas):
                y, x = (int(self.random.integers(side - DIGIT + 1)) for side in size)
                place = (slice(y, y + DIGIT), slice(x, x + DIGIT))
                if (label[place] != BACKGROUND).any():
                    continue  # Digits must not overlap.
                ink = self.images[digit]
                image[0][place] += ink
                label[place][ink > 0.5] = self.targets[digit]
        return torch.from_numpy(images - 0.5), torch.from_numpy(labels)


class Segmenter(nn.Module):
    """Label each pixel by features of two blocks: (B, 1, H, W) -> logits (B, classes, H, W)."""

    def __init__(self, name: str, width: int = 64) -> None:
        super().__init__()
        self.features = timm.create_model(name, features_only=True, out_indices=(1, 3), **MODELS[name])
        self.laterals = nn.ModuleList(nn.Conv2d(c, width, 1) for c in self.features.feature_info.channels())
        self.head = nn.Sequential(
            nn.GELU(), nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, PATCH * PATCH * CLASSES, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        maps = [lateral(map_) for lateral, map_ in zip(self.laterals, self.features(images), strict=True)]
        return F.pixel_shuffle(self.head(torch.stack(maps).sum(0)), PATCH)


def train(name: str, seed: int, steps: int) -> Segmenter:
    torch.manual_seed(seed)
    model, canvas = Segmenter(name), Canvas(True, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for _ in range(steps):
        images, labels = canvas(32, TRAINED)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.inference_mode()
def mean_iou(model: Segmenter, size: tuple[int, int], count: int) -> float:
    """Compute the mean intersection over union of the classes, in percent."""
    metric, canvas = MulticlassJaccardIndex(CLASSES), Canvas(False, seed=1)
    for _ in range(count):
        images, labels = canvas(4, size)
        metric.update(model(images), labels)
    return 100 * float(metric.compute())


@torch.inference_mode()
def agreement(model: Segmenter, size: tuple[int, int], count: int) -> float:
    """Compute the mean cosine between features of the same place in two views of a canvas, `SHIFT` patches apart."""
    canvas, cosines = Canvas(False, seed=2), []
    down, right = SHIFT
    for _ in range(count):
        images, _ = canvas(4, (size[0] + PATCH * down, size[1] + PATCH * right))
        first = model.features(images[..., : size[0], : size[1]])[-1]
        second = model.features(images[..., PATCH * down :, PATCH * right :])[-1]
        cosines.append(F.cosine_similarity(first[..., down:, right:], second[..., :-down, :-right], dim=1).mean())
    return float(torch.stack(cosines).mean())


def cell(column: Sequence[float]) -> str:
    """Format the mean over seeds, with its standard error if there are several seeds."""
    mean = f"{statistics.mean(column):.3g}"
    return f"{mean} ± {statistics.stdev(column) / len(column) ** 0.5:.1g}" if len(column) > 1 else mean


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=800, help="of 32 canvases each")
    parser.add_argument("--count", type=int, default=25, help="tests at each size: so many times 4 canvases")
    options = parser.parse_args(argv)
    print("| model | " + " | ".join(f"IoU at {h} x {w}" for h, w in SIZES) + " | features shifted |")
    print("|---" * (len(SIZES) + 2) + "|")
    for name in options.models:
        rows = []
        for seed in options.seeds:
            model = train(name, seed, options.steps)
            row = [mean_iou(model, size, options.count) for size in SIZES]
            rows.append([*row, agreement(model, TRAINED, options.count)])
        print(f"| `{name}` | " + " | ".join(map(cell, zip(*rows, strict=True))) + " |", flush=True)


if __name__ == "__main__":
    main()
