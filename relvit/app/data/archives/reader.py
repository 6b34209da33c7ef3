"""Base class of the readers of archives, and the list of images and labels that a reader returns."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from relvit.app.data.images.decode import StoredImage


class Content(NamedTuple):
    """The images of a split.

    Attributes:
        images: The images.
        labels: The label of each image as text, a name or a number, and None for an image without a label; empty if
            labels were not requested.
        declared: The names of the classes in order, if the data declare them; some classes may have no images.
    """

    images: Sequence[StoredImage]
    labels: Sequence[str | None] = ()
    declared: Sequence[str] | None = None


class Reader(ABC):
    """Finds the images of a dataset and their labels, without decoding any.

    A new format is a subclass, with a subclass of `StoredImage` for its images; `_kind`, `_located` and `_reader` in
    `modules/readers.py` choose the reader by the prefix of the data's name.

    Attributes:
        splits: The names of the splits that `find` has found in the data so far.
    """

    splits: Sequence[str] = ()

    @abstractmethod
    def find(self, split: str, labelled: bool) -> Content:
        """Find the images of a split, and their labels if needed, in an order that is always the same.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: There is no such split, it has no images or no labels, or its files are broken.
        """

    @abstractmethod
    def key(self, image: Any) -> str:
        """Name one of these images uniquely, without the location of the data."""

    def identity(self, image: Any) -> str:
        """Name one of these images by one name in all splits, so that an image in two splits is found."""
        return str(image)

    def sizes(self, images: Sequence[Any]) -> Iterable[int | None]:
        """Give the size of each image of one split in bytes, None where only reading the image would tell its size."""
        return (image.size for image in images)
