"""List the images of a split with sizes and labels; `training/run/images_csv.py` writes and compares such lists."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from relvit.app.data.class_labels import label_of, label_text
from relvit.app.data.images.image_cache import StackedImages


class ListedImage(NamedTuple):
    """An image of a split.

    Attributes:
        name: The image's name without the location of the data; for an image in memory its index in the dataset.
        content: The size of the image's file in bytes; for an image in memory a hash of its pixels; '' if the size is
            not known.
        label: The name of the image's class; for a multi-label image the names of its classes, joined by ';'.
    """

    name: str
    content: str
    label: str


def file_size(path: str) -> int | None:
    """Return the size of a file in bytes, or None if the file cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def images_in_memory(dataset: StackedImages, class_names: Sequence[str]) -> Iterator[ListedImage]:
    """Yield the images of a dataset with a hash of their pixels."""
    for index, target in enumerate(dataset.targets):
        pixels = hashlib.blake2b(dataset.values(index).tobytes(), digest_size=16)
        yield ListedImage(f"{index:05d}", pixels.hexdigest(), label_text(label_of(target), class_names))
