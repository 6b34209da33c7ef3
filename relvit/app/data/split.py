"""Automatic validation split: hold out a part of each class of train; warn of a val_fraction without effect."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from relvit.app.data.recorded_arguments import RecordedArguments


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


@rank_zero_only
def warn_of_unused_split(data: RecordedArguments) -> None:
    """Warn, in the main process, of options of the automatic split that are given for data with their own val."""
    # A user's class may have other defaults than relvit's classes, and need not pass these options on.
    defaults = data.argument_defaults()
    for name, default in {"val_fraction": 0.1, "split_seed": 0}.items():
        if (given := getattr(data, name)) not in (default, defaults.get(name)):
            warnings.warn(f"{name} {given} has no effect, since the data have their own val", stacklevel=3)
