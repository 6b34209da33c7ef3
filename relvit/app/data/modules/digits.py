"""DigitsData: scikit-learn's handwritten digits, for a first run without any download."""

from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from relvit.app.data.class_labels import check_class_names
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.modules.base import ImageData, Split
from relvit.app.data.transforms import Augment

DIGITS_CLASSES = [str(digit) for digit in range(10)]
_SPLIT_SEED = 0


@cache
def _digits() -> tuple[np.ndarray, np.ndarray, dict[Split, np.ndarray]]:
    """Images uint8 (1797, 8, 8), labels int64 (1797,), and the indices of each split."""
    # Importing scikit-learn takes a second, so import it only when the digits are used.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = ((bunch.images.astype(np.int64) * 255 + 8) // 16).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    rest, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=_SPLIT_SEED)
    train, val = train_test_split(rest, test_size=180, stratify=labels[rest], random_state=_SPLIT_SEED)
    return images, labels, {"train": np.sort(train), "val": np.sort(val), "test": np.sort(test)}


class DigitsData(ImageData):
    """1,797 handwritten digits of 8 x 8 grey pixels (scikit-learn's load_digits, from UCI), in ten classes.

    The stratified split is fixed and depends on no seed: 1,257 images to train, 180 to validate, 360 to test. Predict
    yields the test images, named 'digits/test/0000' to 'digits/test/0359'.

    Args:
        img_size: Size of the images given to the model, one number or (height, width); the stored images have 8 x 8
            pixels.
        augment: Augmentation of the training images, see :func:`relvit.app.data.train_transform`.
        num_workers: Processes that load images; 0 loads them in the main process, which is faster than other processes
            for these small images.
        class_names: None, or the class names of a checkpoint, which must be '0' to '9'.
        options: See :class:`relvit.app.data.ImageData`.

    Raises:
        ValueError: An argument is out of its range, or `class_names` are not '0' to '9'.
    """

    # These are the mean and the standard deviation of the 1,257 training images.
    channels: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]] = ((0.3049319887,), (0.3756725775,))

    def __init__(
        self,
        img_size: int | tuple[int, int] = 8,
        augment: Augment = "shift",
        num_workers: int = 0,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        self.check_options(options)
        check_class_names(class_names, DIGITS_CLASSES, "the digits have")
        super().__init__(DIGITS_CLASSES, 1, img_size=img_size, augment=augment, num_workers=num_workers, **options)

    def missing(self, split: Split) -> str | None:
        """Return None: the digits have every split."""
        return None

    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of one split."""
        images, labels, indices = _digits()
        if split == "predict":
            chosen = indices["test"]
            targets: list[int] | list[str] = [f"digits/test/{i:04d}" for i in range(len(chosen))]
        else:
            chosen = indices[split]
            targets = labels[chosen].tolist()
        return StackedImages(torch.from_numpy(images[chosen]), targets, self.transform_of(split))
