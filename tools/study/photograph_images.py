"""Images of the study of photographs: pack them into one file, and cut, scale and mirror batches of them on any device.

`pack` stores each split at one size; `load` decodes all images into tensors of bytes. `resampled` is the one operation
of training and evaluation: random crops, the whole image at a size, and its middle are different boxes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# WebP of this quality packs Imagenette, 160 px for training and 224 px for tests, into less than 60 MB.
QUALITY = 50
# A random crop has the aspect ratio of the resulting image, times a random factor between these two numbers.
RATIOS = (3 / 4, 4 / 3)


class Images(NamedTuple):
    """Images (N, 3, height, width) of bytes and labels (N,)."""

    pixels: Tensor
    labels: Tensor

    def take(self, rows: Tensor) -> Images:
        """Return the images of these rows."""
        rows = rows.to(self.labels.device)
        return Images(self.pixels[rows], self.labels[rows])

    def to(self, device: torch.device) -> Images:
        """Return the images on a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


def pack(root: Path, file: Path, splits: Mapping[str, tuple[str, int | None, int]]) -> None:
    """Store class folders as one npz file without pickled objects.

    Args:
        root: the folder of the splits' class folders.
        file: the file to write.
        splits: for 'train' and 'test' the folder below `root`, the side in pixels (None: the files are stored as they
            are, all of one size), and how many images of each class are taken, in the order of file names.
    """
    arrays: dict[str, np.ndarray] = {}
    for split, (folder, side, most) in splits.items():
        names = sorted(path.name for path in (root / folder).iterdir())
        files = [(label, path) for label, name in enumerate(names) for path in of_class(root / folder / name, most)]
        encoded = [encode(path, side) for _, path in files]
        arrays |= {
            f"{split}_bytes": np.frombuffer(b"".join(encoded), np.uint8),
            f"{split}_lengths": np.array([len(each) for each in encoded]),
            f"{split}_labels": np.array([label for label, _ in files]),
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as stream:
        np.savez(stream, **arrays)


def of_class(folder: Path, most: int) -> list[Path]:
    """Return the first files of a class folder."""
    return sorted(folder.iterdir())[:most]


def encode(path: Path, side: int | None) -> bytes:
    """Return an image as WebP, scaled to a side, or the file itself where there is no side."""
    if side is None:
        return path.read_bytes()
    stream = io.BytesIO()
    with Image.open(path) as image:
        image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS).save(stream, "WEBP", quality=QUALITY)
    return stream.getvalue()


def decode(encoded: bytes) -> np.ndarray:
    """Return the pixels (height, width, 3) of an encoded image."""
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def load(file: Path, threads: int = 1) -> dict[str, Images]:
    """Read what `pack` wrote: the images of 'train' and 'test'."""
    found = {}
    with np.load(file) as arrays:
        for split in ("train", "test"):
            ends = arrays[f"{split}_lengths"].cumsum()
            encoded = np.split(arrays[f"{split}_bytes"], ends[:-1])
            with ThreadPoolExecutor(threads) as pool:
                decoded = list(pool.map(decode, (each.tobytes() for each in encoded)))
            pixels = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).contiguous()
            found[split] = Images(pixels, torch.from_numpy(arrays[f"{split}_labels"]).long())
    return found


def synthetic(count: int, side: int, seed: int) -> Images:
    """Return random images of ten classes, for trials of the command."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 10)


def resampled(pixels: Tensor, boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Cut boxes out of images and scale them, by the antialiased bilinear filter of Pillow's `resize(size, box=)`.

    Args:
        pixels: (N, channels, height, width) of bytes or floats.
        boxes: (N, 4), top, left, bottom and right in pixels. Where left lies beyond right, the image is mirrored.
        size: height and width of the result.

    Returns:
        (N, channels, *size), float32, in the units of `pixels`.
    """
    boxes = boxes.to(pixels.device, torch.float32)
    rows = filters(boxes[:, 0], boxes[:, 2], pixels.shape[2], size[0])
    columns = filters(boxes[:, 1], boxes[:, 3], pixels.shape[3], size[1])
    return rows[:, None] @ pixels.float() @ columns[:, None].mT


def filters(first: Tensor, last: Tensor, length: int, size: int) -> Tensor:
    """Return the weights (N, size, length) by which the pixels between two edges (N,) become `size` pixels."""
    scale = ((last - first) / size)[:, None]
    centres = first[:, None] + (torch.arange(size, device=first.device) + 0.5) * scale
    distances = (torch.arange(length, device=first.device) + 0.5 - centres[..., None]).abs()
    # Pillow's filter is as wide as a pixel of the larger one of the two images.
    weights = (1 - distances / scale.abs().clamp(min=1)[..., None]).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def middle(shape: Sequence[int], share: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the box in the middle of an image (height, width) that has a share of its height and of its width."""
    (top, bottom), (left, right) = (
        (length * (1 - part) / 2, length * (1 + part) / 2) for length, part in zip(shape, share, strict=True)
    )
    return top, left, bottom, right


def random_boxes(
    generator: torch.Generator, count: int, within: Sequence[float], ratio: float, least_area: float
) -> Tensor:
    """Draw boxes as `RandomResizedCrop` does, (count, 4), every second one mirrored on average.

    Args:
        generator: a generator of the CPU, so that all devices and models see the same boxes.
        count: number of boxes.
        within: top, left, bottom and right of the box that holds all of them.
        ratio: width over height of the images that they make; boxes have `RATIOS` times this ratio.
        least_area: the least share of the area of `within`; sides longer than `within` are cut to its own.
    """
    area, aspect, down, right, mirror = torch.rand(5, count, generator=generator, dtype=torch.float64)
    height, width = within[2] - within[0], within[3] - within[1]
    low, high = (math.log(each * ratio) for each in RATIOS)
    aspect = torch.exp(low + (high - low) * aspect)
    area = height * width * (least_area + (1 - least_area) * area)
    heights = (area / aspect).sqrt().clamp(max=height)
    widths = (area * aspect).sqrt().clamp(max=width)
    top = within[0] + (height - heights) * down
    left = within[1] + (width - widths) * right
    flipped = mirror < 0.5
    edges = torch.where(flipped, left + widths, left), torch.where(flipped, left, left + widths)
    return torch.stack([top, edges[0], top + heights, edges[1]], dim=1)
