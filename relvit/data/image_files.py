"""What all data modules of image files share: defaults for photographs, a split of their own, unreadable files."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, Dataset

from relvit.data.base import ImageData, Split
from relvit.data.files import LabelledFiles, NamedFiles
from relvit.data.images import ImageSource
from relvit.data.split import check_fraction, stratified_split
from relvit.data.transforms import Augment
from relvit.data.unreadable import Tolerant, TolerantLoader, collate_readable
from relvit.names import did_you_mean

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

OnError = Literal["error", "skip"]


class ImageFilesData(ImageData):
    """Images from files, or stored elsewhere as files, read as RGB by :func:`relvit.data.load_rgb`.

    A subclass implements :meth:`missing`, `_came`, `_samples`, `_paths_to_predict`, `_shown` and `place`.

    Args:
        class_names: Name of each class; the position is the label.
        img_size: Size of the images given to the model, one number or (height, width).
        augment: Augmentation of the training images, see :func:`relvit.data.train_transform`.
        crop_pct: Share of the side that the centre crop of evaluation keeps, in (0, 1].
        mean: Mean of red, green and blue, in units of the range 0..1.
        std: Standard deviation of red, green and blue, in the same units.
        val_fraction: Share of each class of train that is put aside where there is no val, in (0, 1).
        split_seed: Another seed puts other images aside; the seed of the training has no part in it.
        on_error: What to do about a file that cannot be read: 'error' stops and names it; 'skip' goes on, in training
            with the next image in its place, otherwise without it, so that no result counts it, and keeps path and
            reason in :attr:`unreadable`.
        options: See :class:`relvit.data.ImageData`.

    Raises:
        ValueError: An argument out of its range, fewer than two classes, or a class named twice.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        /,
        *,
        img_size: int | tuple[int, int] = 224,
        augment: Augment = "resized-crop",
        crop_pct: float = 0.9,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        on_error: OnError = "error",
        **options: Any,
    ) -> None:
        allowed = get_args(OnError)
        if on_error not in allowed:
            hint = did_you_mean(str(on_error), allowed)
            raise ValueError(f"on_error is {on_error!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
        self.val_fraction = check_fraction(val_fraction)
        self.split_seed = split_seed
        self.on_error: OnError = on_error
        super().__init__(
            class_names, 3, img_size=img_size, augment=augment, crop_pct=crop_pct, mean=mean, std=std, **options
        )

    @abstractmethod
    def _came(self, split: Split) -> bool:
        """Whether the data bring images of their own for train, val or test."""

    @abstractmethod
    def _samples(self, split: Split) -> list[tuple[ImageSource, int]]:
        """Path, or stored image, and label of the images that came for train, val or test."""

    @abstractmethod
    def _paths_to_predict(self) -> list[ImageSource]:
        """Paths of the images to predict, or stored images."""

    @abstractmethod
    def _shown(self, path: ImageSource) -> str:
        """A path, or stored image, of train as the user knows it, without what depends on where the data are."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the data are, for messages."""

    def _hashed(self, path: ImageSource) -> str:
        """The name of an image of train that decides on which side of the split it is."""
        return self._shown(path)

    def build(self, split: Split) -> Dataset:
        """The dataset of one split; looks for its files."""
        if split == "predict":
            return NamedFiles(self._paths_to_predict(), self.eval_transform)
        if split == "train":
            return LabelledFiles(self._divided[0], self.train_transform)
        return LabelledFiles(self._samples(split) if self._came(split) else self._divided[1], self.eval_transform)

    def held_out(self) -> list[tuple[str, int]]:
        """Paths, as they are without where the data are, and labels, of the training images put aside to validate."""
        put_aside = self._divided[1] if self._came("train") else []
        return [(self._shown(path), label) for path, label in put_aside]

    @cached_property
    def _divided(self) -> tuple[list[tuple[ImageSource, int]], list[tuple[ImageSource, int]]]:
        """The images to train on, and those put aside to validate where nothing came for that."""
        samples = self._samples("train")
        if self._came("val"):
            return samples, []
        names = [self._hashed(path) for path, _ in samples]
        parts = stratified_split(names, [label for _, label in samples], self.val_fraction, self.split_seed, self.place)
        larger, smaller = ([samples[i] for i in part] for part in parts)
        return larger, smaller

    def _make_loader(self, split: Split, **arguments: Any) -> DataLoader:
        if self.on_error == "error":
            return super()._make_loader(split, **arguments)
        record = self.unreadable.setdefault(split, {})
        dataset = self._asked(split, Tolerant(self.dataset(split), replace=split == "train"))
        return TolerantLoader(dataset, collate_fn=collate_readable, record=record, **arguments)
