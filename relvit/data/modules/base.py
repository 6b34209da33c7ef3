"""What all image data modules share: arguments, transforms, loaders."""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from relvit.data.loading.deterministic import Draws
from relvit.data.loading.eval_shards import ShareLoader, batches_per_rank
from relvit.data.loading.loader import SteadyLoader, heed_no_stop_signal
from relvit.data.loading.memory import BatchTransform, MemoryImages, WholeBatches, as_it_is, batch_transform
from relvit.data.loading.train_sampler import (
    Balance,
    TrainSampler,
    check_balance,
    class_weights,
    for_this_process,
    training_position,
)
from relvit.data.transforms import Augment, eval_transform, parse_size, train_transform
from relvit.utils.messages import listing, printable
from relvit.utils.seeding import run_seed

Split = Literal["train", "val", "test", "predict"]

# But for 'test', which evaluates any split.
_SPLITS_OF_STAGE: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "predict": ("predict",),
}


class ImageData(LightningDataModule, ABC):
    """Images with one label each, in the splits train, val, test and predict.

    Items are ``(image, label)``, those of predict ``(image, name)``: image float32 (C, H, W), label int, name str.
    The names, the number of classes and the channels are known at construction, so that a model can be built from
    them; images are looked for when a split is first used.

    A subclass implements :meth:`missing` and :meth:`build`, and keeps each argument of its constructor in an
    attribute of the same name, from which :meth:`init_args` reads it. It takes the keyword arguments below as
    ``**options`` and hands them on; the positional ones it knows itself.

    Args:
        class_names: Name of each class; the position is the label.
        in_chans: Channels of the images.
        img_size: Size of the images given to the model, one number or (height, width).
        augment: Augmentation of the training images, see :func:`relvit.data.train_transform`.
        crop_pct: Share of the side that the centre crop of evaluation keeps, in (0, 1].
        mean: Mean of each channel by which the images are normalised, in units of the range 0..1.
        std: Standard deviation of each channel, in the same units.
        batch_size: Images per batch (and per device).
        num_workers: Processes that load images; 0 loads them in the main process.
        color_jitter: Strength of the colour jitter in training; none: as `augment` has it.
        random_erasing: Probability of random erasing in training; none: as `augment` has it.
        balance: What to do about classes of different sizes: 'none'; 'sampler' draws the training images with
            replacement so that every class comes equally often; 'loss' draws nothing otherwise but gives
            :attr:`class_weights` for the loss.
        repeats: Copies of an image in a training batch, each augmented in its own way; an epoch keeps its length and
            sees only one image in `repeats` (repeated augmentation, see :class:`relvit.data.TrainSampler`).

    Raises:
        ValueError: An argument out of its range, fewer than two classes, or a class named twice.
    """

    # Whether it can be chosen by its name, as by `--data`.
    chosen_by_name: ClassVar[bool] = True

    def __init__(
        self,
        class_names: Sequence[str],
        in_chans: int,
        /,
        *,
        img_size: int | tuple[int, int],
        augment: Augment,
        crop_pct: float,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int = 64,
        num_workers: int = 2,
        color_jitter: float | None = None,
        random_erasing: float | None = None,
        balance: Balance = "none",
        repeats: int = 1,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; give 1 or more")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 (load in the main process) or more")
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}; give 1 (every image once) or more, such as 3")
        self.class_names: list[str] = _checked_classes(class_names)
        self.in_chans = in_chans
        self.img_size: tuple[int, int] = parse_size(img_size)
        self.augment: Augment = augment
        self.crop_pct = crop_pct
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.color_jitter = color_jitter
        self.random_erasing = random_erasing
        self.balance: Balance = check_balance(balance)
        self.repeats = repeats
        self.normalise_by(mean, std)
        self._datasets: dict[Split, Dataset] = {}
        self._begin = (0, 0)
        # The split that a test evaluates.
        self.evaluated_split: Split = "test"
        # Path and reason of the images of each split that could not be read so far (data from files, on_error='skip').
        self.unreadable: dict[Split, dict[str, str]] = {}

    def normalise_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Normalise the images by another mean and standard deviation; before they are first used.

        Raises:
            ValueError: Not one number for each channel, or an std that is not greater than zero.
        """
        if len(mean) != self.in_chans:
            raise ValueError(
                f"mean is {tuple(mean)}; the images have {self.in_chans} channels, give {self.in_chans} numbers"
            )
        self.mean: tuple[float, ...] = tuple(mean)
        self.std: tuple[float, ...] = tuple(std)
        augmentation = self.augment, self.crop_pct, self.color_jitter, self.random_erasing
        self.train_transform = train_transform(self.img_size, self.mean, self.std, *augmentation)
        self.eval_transform = eval_transform(self.img_size, self.mean, self.std, self.crop_pct)

    @abstractmethod
    def missing(self, split: Split) -> str | None:
        """Why there is no such split and what to do, or None if there is one. Cheap: reads no images."""

    @abstractmethod
    def build(self, split: Split) -> Dataset:
        """The dataset of a split that is not missing, with ``train_transform`` or ``eval_transform``."""

    def held_out(self) -> list[tuple[str, int]]:
        """Names and labels of the training images that were put aside to validate, where no split came with the data.

        Known once the images have been looked for; empty where there was nothing to put aside.
        """
        return []

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def class_weights(self) -> Tensor | None:
        """With ``balance='loss'``: float32 (num_classes,), by which the loss of each class is to be multiplied.

        ``images / (num_classes * images of the class)``, as scikit-learn's 'balanced': the mean over all training
        images is one. None with any other balance. Looks for the training images.
        """
        if self.balance != "loss":
            return None
        return class_weights(self.dataset("train").targets, self.num_classes)

    @property
    def has_test(self) -> bool:
        """Whether there is a test split (a folder counts before its files are looked at)."""
        return self.missing("test") is None

    def init_args(self) -> dict[str, Any]:
        """The arguments with which ``type(self)(**init_args)`` builds the same module, class names included.

        Only str, int, float, bool, None and lists of them, so that a checkpoint can store them.
        """
        return {name: _plain(getattr(self, name)) for name in self.argument_names()}

    @classmethod
    def argument_names(cls) -> list[str]:
        """The names of the constructor's arguments, with those that it hands on as ``**options``."""
        names: list[str] = []
        for part in cls.__mro__:
            if "__init__" not in vars(part):
                continue
            parameters = list(inspect.signature(part.__init__).parameters.values())[1:]  # without self
            names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return list(dict.fromkeys(names))

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
            splits = (self.evaluated_split,) if stage == "test" else _SPLITS_OF_STAGE[stage]
        for split in splits:
            self.dataset(split)

    def evaluate_on(self, split: Split) -> None:
        """Let a test evaluate the images of train, val or test; those of train in order and without augmentation."""
        self.evaluated_split = split
        self._datasets.pop("train", None)

    def trains_on(self, split: Split) -> bool:
        """Whether the images of a split are shuffled and augmented: those of train, unless a test evaluates them."""
        return split == "train" and self.evaluated_split != "train"

    def begin_at(self, epoch: int, batch: int) -> None:
        """Where the training begins: with that epoch, after so many of its batches (of each device)."""
        self._begin = (epoch, batch)

    def state_dict(self) -> dict[str, int]:
        """Of a training: the epoch, and how many of its batches are done."""
        epoch, batch = training_position(self.trainer)
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Begin where the training was."""
        self.begin_at(**state_dict)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches; a last one of a single image is left out, which batch norm could not normalise.

        The order follows from seed and epoch, the augmentation of an image from its place in it as well. On several
        devices each gets its share. A training that goes on within an epoch begins with the first batch that is left.
        """
        dataset = self.dataset("train")
        weights = None
        if self.balance == "sampler":
            weights = class_weights(dataset.targets, self.num_classes)[torch.as_tensor(dataset.targets)]
        # Known already here: the loader may begin to load before Lightning says which epoch it is.
        epoch, done = self._begin
        if self.trainer is not None and self.trainer.current_epoch > epoch:
            epoch, done = self.trainer.current_epoch, 0
        place = {"epoch": epoch, "start": done * self.batch_size}
        sampler = TrainSampler(len(dataset), weights, self.repeats, **for_this_process(self.trainer), **place)
        alone = len(sampler) > 1 and len(sampler) % self.batch_size == 1
        return self._loader("train", sampler=sampler, drop_last=alone)

    def val_dataloader(self) -> DataLoader | ShareLoader:
        """All validation images in order; on several devices this one's share, see :class:`ShareLoader`."""
        return self._share("val")

    def test_dataloader(self) -> DataLoader | ShareLoader:
        """All test images in order; on several devices this one's share, see :class:`ShareLoader`.

        Or those of another split, see :meth:`evaluate_on`.
        """
        return self._share(self.evaluated_split)

    def predict_dataloader(self) -> DataLoader | ShareLoader:
        """All images to predict in order, with their names; on several devices this one's share, as in a test."""
        return self._share("predict")

    def _share(self, split: Split) -> DataLoader | ShareLoader:
        if self.trainer is None or self.trainer.world_size == 1:
            return self._loader(split)
        world = self.trainer.world_size
        count = len(self.dataset(split))
        loader = self._loader(split, sampler=range(self.trainer.global_rank, count, world))
        no_targets = [] if split == "predict" else torch.empty(0, dtype=torch.long)
        nothing = torch.empty(0, self.in_chans, *self.img_size), no_targets
        return ShareLoader(loader, batches_per_rank(count, world, self.batch_size), nothing)

    def _loader(
        self,
        split: Split,
        sampler: Sampler | Sequence[int] | None = None,
        drop_last: bool = False,
    ) -> DataLoader:
        return self._make_loader(
            split,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            worker_init_fn=heed_no_stop_signal,
        )

    def _make_loader(self, split: Split, **arguments: Any) -> DataLoader:
        """The loader of a split with further arguments of `DataLoader`."""
        dataset, transform = self.dataset(split), self._batch_transform(split)
        if transform is None:
            return SteadyLoader(self._asked(split, dataset), **arguments)
        batches = WholeBatches(dataset, transform)
        return SteadyLoader(self._asked(split, batches), collate_fn=as_it_is, **arguments)

    def _asked(self, split: Split, dataset: Dataset) -> Dataset:
        """A dataset as the loader of a split asks it: by draws in training, where items are made at random."""
        return Draws(dataset, run_seed()) if self.trains_on(split) else dataset

    def _batch_transform(self, split: Split) -> BatchTransform | None:
        """What is done to a whole batch at once, or None where images come one by one: where they are not in memory in
        one size, or their transform has no such form."""
        images = self.dataset(split)
        if not isinstance(images, MemoryImages):
            return None
        training = self.trains_on(split)
        return batch_transform(
            tuple(images.pixels.shape[1:]),
            self.img_size,
            self.mean,
            self.std,
            self.augment if training else "none",
            self.crop_pct,
            self.color_jitter if training else None,
            self.random_erasing if training else None,
        )


def _checked_classes(class_names: Sequence[str]) -> list[str]:
    names = list(class_names)
    for name in names:
        if printable(name) != name:
            raise ValueError(f"the class name '{printable(name)}' is not UTF-8; rename it")
    if len(names) < 2:
        raise ValueError(f"classification needs two or more classes, got {names}; add images of another class")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"class_names holds {', '.join(map(repr, twice))} more than once; name each class once")
    return names


def check_class_names(given: Sequence[str] | None, own: Sequence[str], whose: str) -> None:
    """Refuse other class names than those that the data have by themselves.

    Raises:
        ValueError: `given` is not None and differs from `own`.
    """
    if given is not None and list(given) != list(own):
        raise ValueError(
            f"class_names is {listing(list(given))}; {whose} the classes {listing(list(own))}: "
            "leave it out, or use the data that the checkpoint was trained on"
        )


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
