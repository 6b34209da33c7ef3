"""Where images come from that have no files of their own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from relvit.data.files.images import StoredImage


class Content(NamedTuple):
    """The images of a split.

    Attributes:
        images: The images.
        labels: The label of each as the data state it, a name or a number, None where there is none; without labels
            if none were asked for.
        declared: The names of the classes in their order, where the data name them; images of some may be missing.
    """

    images: Sequence[StoredImage]
    labels: Sequence[str | None] = ()
    declared: Sequence[str] | None = None


class Reader(ABC):
    """Finds the images of a dataset and their labels, without decoding any."""

    @abstractmethod
    def find(self, split: str, labelled: bool) -> Content:
        """The images of a split, in an order that is always the same.

        Args:
            split: Its name.
            labelled: Whether labels are needed.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: There is no such split, it has no images or no labels, or its files are broken.
        """

    @abstractmethod
    def key(self, image: Any) -> str:
        """A name of one of these images that says nothing about where the data are stored; no two have the same."""
