"""Base class of data modules that read image files: defaults for photographs, split, cache, test images in train."""

import sys
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import Dataset

from relvit.app.data.class_labels import Label, class_counts, counts_text, doubtful_classes, label_text, rarest
from relvit.app.data.images.decode import ImageSource
from relvit.app.data.images.file_datasets import LabelledFiles, NamedFiles, OnError
from relvit.app.data.images.image_cache import decode_into_memory, in_units
from relvit.app.data.images.manifest import ListedImage, file_size
from relvit.app.data.modules.base import ImageData, Split
from relvit.app.data.split import stratified_split, warn_of_unused_split
from relvit.app.utils.files import canonical_paths
from relvit.app.utils.number_types import OpenShare, check_ranges
from relvit.app.utils.progress import with_bar
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import check_choice, listing

# Splits with these names, in lower or upper case, are probably meant as val or test.
MEANT_AS: dict[Split, tuple[str, ...]] = {
    "val": ("val", "valid", "validation", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}


class ImageFilesData(ImageData):
    """Images from files, or stored images, read as RGB by :func:`relvit.app.data.load_rgb`.

    A subclass implements :meth:`missing`, `_has_own`, `_samples`, `_paths_to_predict`, `_display_name` and `place`; a
    subclass that also implements `_name_in_split` lets a training resume after its data have moved to another folder.

    Args:
        class_names: Name of each class; the label of a class is its index in this list.
        crop_pct: Share of the side that the centre crop of evaluation keeps, in (0, 1].
        val_fraction: Share of each class of train that is held out if there is no val, in (0, 1).
        split_seed: Another seed holds out other images. The seed of the training does not matter here.
        on_error: What to do about a file that cannot be read: 'error' stops and names the file. 'skip' continues: a
            training takes the next image instead, and an evaluation leaves the image out. The attribute
            :attr:`unreadable` then has the path of the file and the reason.
        cache: Whether the images of train and val are decoded once, when train is first used, and kept in memory at
            their own sizes, with 8 bits per channel. If all images of a split have the size `img_size`, the
            augmentations 'none', 'shift' and 'crop-flip' then work on whole batches. Workers share this memory, but the
            process of each device has its own copy. If the images need more than four fifths of the available memory,
            they are refused before they are decoded. Only trainings use the cache.
        options: See :class:`relvit.app.data.ImageData`.

    Raises:
        ValueError: An argument is out of its range, there are fewer than two classes, or a class is named twice; or,
            when the images are used, a file is missing or damaged, or the images are too large for the cache.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        *,
        crop_pct: float = 0.9,
        val_fraction: OpenShare = 0.1,
        split_seed: int = 0,
        on_error: OnError = "error",
        cache: bool = False,
        **options: Any,
    ) -> None:
        check_ranges(ImageFilesData.__init__, locals())
        self.check_options(options)
        check_choice("on_error", on_error, get_args(OnError))
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.on_error: OnError = on_error
        self.cache = cache
        self._own_samples: dict[Split, list[tuple[ImageSource, Label]]] = {}
        super().__init__(class_names, 3, crop_pct=crop_pct, **options)

    @abstractmethod
    def _has_own(self, split: Split) -> bool:
        """Return whether the data have separate images for this split (train, val or test)."""

    @abstractmethod
    def _samples(self, split: Split) -> list[tuple[ImageSource, Label]]:
        """Path, or stored image, and label of the data's own images for train, val or test."""

    @abstractmethod
    def _paths_to_predict(self) -> list[ImageSource]:
        """Paths of the images to predict, or stored images."""

    @abstractmethod
    def _display_name(self, path: ImageSource) -> str:
        """Name of an image of train for the user, without the location of the data."""

    def _name_in_split(self, path: ImageSource, split: Split) -> str:
        """Name of an image within its split; it should stay the same where the data are moved."""
        return str(path)

    def _place_of(self, path: ImageSource) -> str:
        """Name an image by one name in all splits."""
        return str(path)

    def _sizes(self, images: Sequence[ImageSource]) -> Iterable[int | None]:
        """Size of each image in bytes, None where it is not known."""
        return map(file_size, images)

    @property
    @abstractmethod
    def place(self) -> str:
        """Location of the data, for messages."""

    def _split_key(self, path: ImageSource) -> str:
        """Name of an image of train whose hash decides between train and val."""
        return self._display_name(path)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        if self._has_own("val"):
            warn_of_unused_split(self)
        for split in ("val", "test"):
            # Look for the images of test now, so that missing or misplaced files are reported before the training, not
            # after it.
            if self._has_own(split) and (samples := self.samples(split)) and rank_zero_only.rank == 0:
                self._warn_of_training_images(split, samples)

    def _warn_of_training_images(self, split: Split, samples: Sequence[tuple[ImageSource, Label]]) -> None:
        """Warn of images in a split of evaluation that are images of train as well."""
        places = set(canonical_paths(self._place_of(image) for image, _ in samples))
        train = [image for part in self._divided for image, _ in part]
        both = zip(train, canonical_paths(map(self._place_of, train)), strict=True)
        if not (shared := [image for image, place in both if place in places]):
            return
        names = listing(sorted(map(self._display_name, shared)), 3)
        if len(shared) == 1:
            found, them = f"1 image of {split} is also an image of train", "it"
        else:
            found, them = f"{len(shared)} images of {split} are also images of train", "them"
        warnings.warn(f"{found}: {names}; the accuracy on {them} says nothing about new images", stacklevel=2)

    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of one split; looks for its files."""
        if split == "predict":
            return NamedFiles(self._paths_to_predict(), self.eval_transform)
        return LabelledFiles(self.samples(split), self.transform_of(split), self.num_classes)

    def samples(self, split: Split) -> list[tuple[ImageSource, Label]]:
        """Path and label of the images of train, val or test; looks for the files and reads none.

        Raises:
            ValueError: There is no such split, or one of its files is missing.
        """
        if reason := self.missing(split):
            raise ValueError(reason)
        if split == "train":
            return self._divided[0]
        if not self._has_own(split):
            return self._divided[1]
        if split not in self._own_samples:
            self._own_samples[split] = self._samples(split)
        return self._own_samples[split]

    def dataset(self, split: Split) -> Dataset[Any]:
        """Return the dataset of one split, built at the first call; with `cache` and train, decode all images.

        Raises:
            ValueError: There is no such split, one of its files is missing or damaged, or the memory is too small.
        """
        if self.cache and self.trains_on(split) and split not in self._datasets and self.missing(split) is None:
            self._datasets |= self._decoded()
        return super().dataset(split)

    def _decoded(self) -> dict[Split, Dataset[Any]]:
        """Decode train and val together, so that the available memory is measured once."""
        start = time.monotonic()
        images = {split: self.build(split) for split in ("train", "val")}
        copies, shown = 1, rank_zero_only.rank == 0 and sys.stderr.isatty()
        if self.trainer is not None:
            copies, shown = self.trainer.num_devices, shown and self.trainer.progress_bar_callback is not None
        decoded = decode_into_memory(
            images, self.img_size, self.on_error == "skip", copies, with_bar if shown else None
        )
        if rank_zero_only.rank == 0:
            count = sum(map(len, decoded.values()))
            size = in_units(sum(dataset.pixels.nbytes for dataset in decoded.values()))
            print(f"{count:,} images of train and val in memory: {size}, {time.monotonic() - start:.1f} s", flush=True)
        return decoded

    def held_out(self) -> list[tuple[str, Label]]:
        """Paths, relative to the location of the data, and labels of the training images held out for validation."""
        smaller = self._divided[1] if self._has_own("train") else []
        return [(self._display_name(path), label) for path, label in smaller]

    def manifest(self, split: Split) -> Iterator[ListedImage]:
        """List the images of train, val or test with their sizes in bytes; reads no image."""
        samples = self.samples(split)
        sizes = self._sizes([image for image, _ in samples])
        for (image, label), size in zip(samples, sizes, strict=True):
            content = "" if size is None else str(size)
            yield ListedImage(self._name_in_split(image, split), content, label_text(label, self.class_names))

    def training_images(self) -> str:
        """Describe the images to train on: how many, how many are held out to validate, and those of each class."""
        labels = [label for _, label in self.samples("train")]
        held_out = f" ({len(aside):,} more held out to validate)" if (aside := self.held_out()) else ""
        return (
            f"{counted(len(labels), 'training image')}{held_out}: {counts_text(class_counts(labels, self.class_names))}"
        )

    def _doubts(self, counts: Mapping[str, int]) -> list[str]:
        """Describe likely mistakes in the classes of train by their numbers of images."""
        return doubtful_classes(counts)

    def _unused(self, names: Iterable[str]) -> dict[Split, str]:
        """Return, for val and test, an unused split of the data whose name suggests that it is meant as val or test."""
        found = {split: sorted(name for name in names if name.casefold() in MEANT_AS[split]) for split in MEANT_AS}
        return {split: meant[0] for split, meant in found.items() if meant and not self._has_own(split)}

    @cached_property
    def _divided(self) -> tuple[list[tuple[ImageSource, Label]], list[tuple[ImageSource, Label]]]:
        """Images to train on, and images held out for validation; if the data have a val, no images are held out.

        Images are held out class by class, and a multi-label image counts as an image of its rarest class.
        """
        samples = self._samples("train")
        labels = [label for _, label in samples]
        if rank_zero_only.rank == 0:
            for doubt in self._doubts(class_counts(labels, self.class_names)):
                # Let the warning name this line of relvit, because the calling line is in Python's `cached_property`.
                warnings.warn(doubt, stacklevel=1)
        if self._has_own("val"):
            return samples, []
        names = [self._split_key(path) for path, _ in samples]
        parts = stratified_split(names, rarest(labels), self.val_fraction, self.split_seed, self.place)
        larger, smaller = ([samples[i] for i in part] for part in parts)
        return larger, smaller
