"""Automatic validation split: hold out a part of each class of train, by a hash of seed and file name."""

import hashlib
from collections import Counter
from collections.abc import Sequence


def stratified_split(
    names: Sequence[str], labels: Sequence[int], fraction: float, seed: int, where: str
) -> tuple[list[int], list[int]]:
    """Split images into a larger and a smaller part, each class in the same proportion; return their indices.

    Of the n images of a class, ``round(n * fraction)`` go to the smaller part, but at least one and at most n - 1; the
    only image of a class stays in the larger part. A hash of the seed and the name decides to which part an image goes.
    So the split does not depend on random state, machine or location, and adding an image moves few images to the other
    part.

    Args:
        names: Name of each image, without the location of the data.
        labels: Class of each image.
        fraction: Share of each class in the smaller part.
        seed: Another seed chooses other images for the smaller part.
        where: Name of the data, for the message.

    Raises:
        ValueError: The smaller part is empty, because no class has two images.
    """

    def rank(index: int) -> str:
        # File names need not be UTF-8, so 'surrogateescape' keeps their bytes.
        return hashlib.sha256(f"{seed}/{names[index]}".encode("utf-8", "surrogateescape")).hexdigest()

    wanted = {label: min(max(1, round(n * fraction)), n - 1) for label, n in Counter(labels).items()}
    larger, smaller = [], []
    for index in sorted(range(len(names)), key=rank):
        if wanted[labels[index]] > 0:
            wanted[labels[index]] -= 1
            smaller.append(index)
        else:
            larger.append(index)
    if not smaller:
        raise ValueError(
            f"no image of {where} can be held out to validate: each is the only one of its class (or of the rarest of "
            "its classes); add images of val"
        )
    return sorted(larger), sorted(smaller)
