"""Write `images.csv.gz` of a run folder, and compare it with the images that a resumed training finds."""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relvit.app.data import ImageData
from relvit.app.data.images.manifest import ListedImage
from relvit.app.data.modules.base import Split
from relvit.app.utils.files import atomic_write
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import listing

FILE = "images.csv.gz"
# A run records the images of these splits, but not of test, whose images take no part in the training.
SPLITS: tuple[Split, ...] = ("train", "val")
# File names need not be UTF-8, so 'surrogateescape' keeps their bytes.
_TEXT = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}

# Each split has 'images', the number of images, and 'digest', a hash of their names, contents and labels in order.
Digests = dict[str, dict[str, Any]]


def compute_digests(data: ImageData) -> Digests:
    """Compute the digest of each split whose images the data can list, without reading an image file."""
    return {split: _digest(images) for split in SPLITS if (images := data.manifest(split)) is not None}


def write_manifest(data: ImageData, path: Path) -> Digests:
    """Write split, name, content and label of each image into a compressed CSV file, and return the digests.

    No file is written if the data module cannot list its images.
    """
    manifests = {split: images for split in SPLITS if (images := data.manifest(split)) is not None}
    digests: Digests = {}
    if not manifests:
        return digests
    with atomic_write(path) as part, gzip.open(part, "wt", compresslevel=3, **_TEXT) as file:
        table = csv.writer(file)
        table.writerow(["split", *ListedImage._fields])
        for split, images in manifests.items():
            digests[split] = _digest(images, lambda image, split=split: table.writerow((split, *image)))
    return digests


def describe_difference(before: Mapping[str, Any], now: Digests, data: ImageData, path: Path) -> str:
    """Describe how the images of each split (digests `now`) differ from a checkpoint's images (digests `before`).

    The description is empty if no image differs. If the manifest of the checkpoint's run is not at `path`, the
    description names no image.
    """
    texts = []
    for split in now:
        if split not in before or before[split] == now[split]:
            continue
        trained = _read_manifest(path, split)
        if _digest(trained) == before[split]:
            texts.append(f"{split}: {', '.join(_differences(trained, list(data.manifest(split) or ())))}")
        else:
            count = f"{counted(now[split]['images'], 'image')}, not those of before"
            texts.append(f"{split}: {count} (there is no {path}, or not of this training, to say which)")
    return "; ".join(texts)


def _digest(images: Iterable[ListedImage], write: Callable[[ListedImage], Any] | None = None) -> dict[str, Any]:
    digest, count = hashlib.blake2b(digest_size=16), 0
    for image in images:
        if write is not None:
            write(image)
        digest.update("\0".join((*image, "")).encode("utf-8", "surrogateescape"))
        count += 1
    return {"images": count, "digest": digest.hexdigest()}


def _read_manifest(path: Path, split: Split) -> list[ListedImage]:
    """Read the images of one split; return none if the file is missing or damaged."""
    try:
        with gzip.open(path, "rt", **_TEXT) as file:
            return [ListedImage(*row[1:]) for row in csv.reader(file) if row[0] == split]
    except (OSError, EOFError, zlib.error, csv.Error, TypeError, IndexError):
        return []


def _differences(before: Sequence[ListedImage], now: Sequence[ListedImage]) -> list[str]:
    then, found = ({image.name: image for image in images} for images in (before, now))
    both = [(then[name], found[name]) for name in then if name in found]
    sizes = all(image.content.isdecimal() or not image.content for image in now)
    kind_of_content = "of another size" if sizes else "with other pixels"
    kinds = {
        "added": [name for name in found if name not in then],
        "removed": [name for name in then if name not in found],
        "with another label": [old.name for old, new in both if old.label != new.label],
        kind_of_content: [old.name for old, new in both if old.content != new.content],
    }
    texts = [f"{len(names):,} {kind} ({listing(names, 3)})" for kind, names in kinds.items() if names]
    return texts or ["the same images in another order"]
