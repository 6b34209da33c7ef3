"""What all image data modules share: arguments, transforms, loaders."""

import inspect
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from relvit.data.shares import ShareLoader, batches_per_rank
from relvit.data.transforms import Augment, eval_transform, parse_size, train_transform

Split = Literal["train", "val", "test", "predict"]

_SPLITS_OF_STAGE: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


class ImageData(LightningDataModule, ABC):
    """Images with one label each, in the splits train, val, test and predict.

    Items are ``(image, label)``, those of predict ``(image, name)``: image float32 (C, H, W), label int, name str.
    The names, the number of classes and the channels are known at construction, so that a model can be built from
    them; images are looked for when a split is first used.

    A subclass implements :meth:`missing` and :meth:`build`, and keeps each argument of its constructor in an
    attribute of the same name, from which :meth:`init_args` reads it.

    Args:
        class_names: Name of each class; the position is the label.
        in_chans: Channels of the images.
        img_size: Size of the images given to the model, one number or (height, width).
        batch_size: Images per batch (and per device).
        num_workers: Processes that load images; 0 loads them in the main process.
        augment: Augmentation of the training images, see :func:`relvit.data.train_transform`.
        crop_pct: Share of the side that the centre crop of evaluation keeps, in (0, 1].
        mean: Mean of each channel, in units of the range 0..1.
        std: Standard deviation of each channel, in the same units.

    Raises:
        ValueError: An argument out of its range, fewer than two classes, or a class named twice.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        in_chans: int,
        img_size: int | tuple[int, int],
        batch_size: int,
        num_workers: int,
        augment: Augment,
        crop_pct: float,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; give 1 or more")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 (load in the main process) or more")
        if len(mean) != in_chans:
            raise ValueError(f"mean is {tuple(mean)}; the images have {in_chans} channels, give {in_chans} numbers")
        self.class_names: list[str] = _checked_classes(class_names)
        self.in_chans = in_chans
        self.img_size: tuple[int, int] = parse_size(img_size)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.augment: Augment = augment
        self.crop_pct = crop_pct
        self.mean: tuple[float, ...] = tuple(mean)
        self.std: tuple[float, ...] = tuple(std)
        self.train_transform = train_transform(self.img_size, self.mean, self.std, augment, crop_pct)
        self.eval_transform = eval_transform(self.img_size, self.mean, self.std, crop_pct)
        self._datasets: dict[Split, Dataset] = {}

    @abstractmethod
    def missing(self, split: Split) -> str | None:
        """Why there is no such split and what to do, or None if there is one. Cheap: reads no images."""

    @abstractmethod
    def build(self, split: Split) -> Dataset:
        """The dataset of a split that is not missing, with ``train_transform`` or ``eval_transform``."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def has_test(self) -> bool:
        """Whether there is a test split (a folder counts before its files are looked at)."""
        return self.missing("test") is None

    def init_args(self) -> dict[str, Any]:
        """The arguments with which ``type(self)(**init_args)`` builds the same module, class names included.

        Only str, int, float, bool, None and lists of them, so that a checkpoint can store them.
        """
        return {name: _plain(getattr(self, name)) for name in inspect.signature(type(self)).parameters}

    def dataset(self, split: Split) -> Dataset:
        """The dataset of one split, built at the first call.

        Raises:
            ValueError: There is no such split, or its files are not as they should be.
        """
        if split not in self._datasets:
            if reason := self.missing(split):
                raise ValueError(reason)
            self._datasets[split] = self.build(split)
        return self._datasets[split]

    def setup(self, stage: str | None = None) -> None:
        """Build the datasets of a stage: 'fit', 'validate', 'test' or 'predict'; None means all that exist.

        Raises:
            ValueError: The stage needs a split that does not exist, or its files are not as they should be.
        """
        if stage is None:
            splits = [split for split in ("train", "val", "test", "predict") if self.missing(split) is None]
        else:
            splits = _SPLITS_OF_STAGE[stage]
        for split in splits:
            self.dataset(split)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches; a last one of a single image is left out, which batch norm could not normalise.

        On several devices Lightning gives each its share, in an order that follows from seed and epoch.
        """
        count = math.ceil(len(self.dataset("train")) / (self.trainer.world_size if self.trainer else 1))
        return self._loader("train", shuffle=True, drop_last=count > 1 and count % self.batch_size == 1)

    def val_dataloader(self) -> DataLoader | ShareLoader:
        """All validation images in order; on several devices this one's share, see :class:`ShareLoader`."""
        return self._share("val")

    def test_dataloader(self) -> DataLoader | ShareLoader:
        """All test images in order; on several devices this one's share, see :class:`ShareLoader`."""
        return self._share("test")

    def predict_dataloader(self) -> DataLoader:
        """All images to predict in order, with their names."""
        return self._loader("predict")

    def _share(self, split: Split) -> DataLoader | ShareLoader:
        if self.trainer is None or self.trainer.world_size == 1:
            return self._loader(split)
        world = self.trainer.world_size
        count = len(self.dataset(split))
        loader = self._loader(split, sampler=range(self.trainer.global_rank, count, world))
        nothing = torch.empty(0, self.in_chans, *self.img_size), torch.empty(0, dtype=torch.long)
        return ShareLoader(loader, batches_per_rank(count, world, self.batch_size), nothing)

    def _loader(
        self, split: Split, shuffle: bool = False, drop_last: bool = False, sampler: Sequence[int] | None = None
    ) -> DataLoader:
        return DataLoader(
            self.dataset(split),
            batch_size=self.batch_size,
            shuffle=shuffle,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )


def _checked_classes(class_names: Sequence[str]) -> list[str]:
    names = list(class_names)
    if len(names) < 2:
        raise ValueError(f"there is only one class or none, {names}; classification needs two or more")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"class_names holds {', '.join(map(repr, twice))} more than once; name each class once")
    return names


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
