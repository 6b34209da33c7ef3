"""Base class of all image data modules: shared arguments, transforms, DataLoaders, and the last batch of an epoch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

from relvit.app.data.at_size import with_transform
from relvit.app.data.class_labels import Label, checked_classes
from relvit.app.data.images.file_datasets import (
    OnError,
    SkipUnreadable,
    SkipUnreadableBatches,
    SkipUnreadableLoader,
    collate_readable,
)
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.images.manifest import ListedImage, images_in_memory
from relvit.app.data.loading.deterministic import DeterministicDataset
from relvit.app.data.loading.eval_shards import EvalShardLoader, shard
from relvit.app.data.loading.loader import SignalSafeDataLoader, identity_collate
from relvit.app.data.loading.sampler import Balance, TrainSampler, class_weights, training_position
from relvit.app.data.loading.size_plan import SizedBatches, SizedBatchSampler, SizePlan, SizeSchedule, check_sizes
from relvit.app.data.loading.user_dataset import LoadedDataset, check_built
from relvit.app.data.recorded_arguments import RecordedArguments, with_transforms
from relvit.app.data.shape import ImageShape, image_shape
from relvit.app.data.transforms import Augment, eval_transform, parse_size, train_transform
from relvit.app.utils.number_types import (
    BatchSize,
    NonNegativeFloat,
    PositiveInt,
    PositiveShare,
    Share,
    Workers,
    check_ranges,
)
from relvit.app.utils.seeding import run_seed
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import check_choice

Split = Literal["train", "val", "test", "predict"]

# Lightning's stages use these splits. The stage 'test' is not here, because a test may use any split.
_SPLITS: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "predict": ("predict",)}

# These are the mean and the standard deviation of each channel (red, green, blue) of ImageNet's images.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ImageData(RecordedArguments, ABC):
    """Images with one label each, or several, in the splits train, val, test and predict.

    An item of a dataset is a pair ``(image, label)``, or, in predict, ``(image, name)``. The image is float32 (C, H,
    W), or, with `native`, a dictionary of patches. The label is an int, or, if :attr:`multi_label` is true, bool
    (num_classes,). Class names and the number of channels are known at construction, so that a model can be built from
    them. No image is decoded before its split is first used.

    A subclass implements :meth:`missing` and :meth:`build`, takes the keyword arguments below as ``**options`` and
    passes them to this class. Its datasets have a length; for `balance` also `targets`, their labels in order; for
    `train_sizes` also `transform`, the transform of their images. A simpler way is a subclass of
    :class:`relvit.app.data.DatasetData`, which implements both for any datasets.

    Args:
        class_names: Name of each class; the label of a class is its index in this list.
        in_chans: Channels of the images.
        img_size: Size of the images given to the model, one number or (height, width).
        augment: Augmentation of the training images, see :func:`relvit.app.data.train_transform`.
        crop_pct: Share of the side that the centre crop of evaluation keeps, in (0, 1].
        mean: Mean of each channel by which the images are normalised, in units of the range 0..1; None: the mean of the
            data; if it is unknown, ImageNet's mean for three channels, otherwise 0.5. If `relvit fit` starts from
            pretrained weights, None means the mean of their pretraining.
        std: Standard deviation of each channel, in the same units; None: as for `mean`.
        batch_size: Images per batch (and per device).
        num_workers: Processes that load images; 0 loads them in the main process.
        color_jitter: Strength of the colour jitter in training; None: the default of `augment`.
        random_erasing: Probability of random erasing in training; None: the default of `augment`.
        balance: What to do if classes have different numbers of images: 'none': nothing; 'sampler' samples the training
            images with replacement so that every class comes equally often; 'loss' gives :attr:`class_weights` for the
            loss.
        repeats: Copies of an image in a training batch, each augmented differently. An epoch keeps its length, so it
            shows only 1 / `repeats` of the images (repeated augmentation, see :class:`relvit.app.data.TrainSampler`).
        train_sizes: Image sizes to train at, each one number or (height, width). All images of an optimiser step, on
            all devices, have the same size, one of `train_sizes`. The number of images in a batch is chosen so that
            they have about as many pixels as `batch_size` images of `img_size`. None: only `img_size`. Evaluation uses
            `img_size`.
        size_schedule: 'random': every size equally often, in random order, and each image about once per epoch;
            'progressive': small sizes first, each for an equal part of the training (see
            :class:`relvit.app.data.SizePlan`).
        native: Whether each image keeps its own height-to-width ratio and is given to the model as a sequence of
            patches, see :mod:`relvit.app.data.shape`; `crop_pct` then has no effect.
        max_tokens: With `native`, the largest number of patches of an image. Unless `img_size` has this number of whole
            patches, `img_size` becomes the size of the largest grid of n x n patches with n * n <= `max_tokens`. None:
            the number of patches of `img_size`.
        patch_size: With `native`, the size of the model's patches, one number or (height, width).

    Raises:
        ValueError: An argument is out of its range or would have no effect, there are fewer than two classes, or a
            class is named twice.
    """

    # If `mean` or `std` is None, these means and standard deviations of the channels of the data are used, if known.
    channels: ClassVar[tuple[tuple[float, ...], tuple[float, ...]] | None] = None
    # If this is False, `--data` does not offer this class of relvit. `--data` offers every imported class of a user,
    # whatever its value of this attribute.
    chosen_by_name: ClassVar[bool] = True
    # Only data modules that read files have `on_error` as an argument; all other data modules keep this value.
    on_error: OnError = "error"
    # If this is True, an image may have any number of labels, even no label.
    multi_label: bool = False

    @with_transforms
    def __init__(
        self,
        class_names: Sequence[str],
        in_chans: int,
        *,
        img_size: int | tuple[int, int] = 224,
        augment: Augment = "resized-crop",
        crop_pct: PositiveShare = 1.0,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        batch_size: BatchSize = 64,
        num_workers: Workers = 2,
        color_jitter: NonNegativeFloat | None = None,
        random_erasing: Share | None = None,
        balance: Balance = "none",
        repeats: PositiveInt = 1,
        train_sizes: list[int | tuple[int, int]] | None = None,
        size_schedule: SizeSchedule = "random",
        native: bool = False,
        max_tokens: int | None = None,
        patch_size: int | tuple[int, int] = (16, 16),
    ) -> None:
        super().__init__()
        check_ranges(ImageData.__init__, locals())
        check_choice("balance", balance, get_args(Balance))
        self.class_names: list[str] = checked_classes(class_names)
        self.in_chans = in_chans
        self.augment: Augment = augment
        self.crop_pct = crop_pct
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.color_jitter = color_jitter
        self.random_erasing = random_erasing
        self.balance: Balance = balance
        self.repeats = repeats
        self.train_sizes: list[tuple[int, int]] | None = check_sizes(train_sizes, size_schedule)
        self.size_schedule: SizeSchedule = size_schedule
        if native and train_sizes is not None:
            raise ValueError(
                "train_sizes gives all images of a batch one size, and native keeps their shapes: leave one of them out"
            )
        self.native = native
        self.max_tokens = max_tokens
        self.patch_size: tuple[int, int] = parse_size(patch_size, "patch_size")
        self.shape: ImageShape = image_shape(img_size, native, max_tokens, self.patch_size)
        self.img_size: tuple[int, int] = self.shape.img_size
        # These statistics were not given: pretrained weights, or a checkpoint, may set them later.
        self.unset_statistics: list[str] = [name for name, value in (("mean", mean), ("std", std)) if value is None]
        known = self.channels or (IMAGENET if in_chans == 3 else ((0.5,) * in_chans,) * 2)
        self.normalise_by(known[0] if mean is None else mean, known[1] if std is None else std)
        self._datasets: dict[Split, Dataset[Any]] = {}
        self._begin = (0, 0)
        # A test uses the images of this split.
        self.evaluated_split: Split = "test"
        # For each split, this attribute maps the path of each skipped image to the reason, see `on_error`.
        self.unreadable: dict[Split, dict[str, str]] = {}

    def normalise_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set mean and standard deviation for the normalisation, before images are first used.

        Raises:
            ValueError: There is not one number for each channel, or a number in `std` is not greater than zero.
        """
        mean, std = ((each,) if isinstance(each, float | int) else each for each in (mean, std))
        if len(mean) != self.in_chans:
            raise ValueError(
                f"mean is {tuple(mean)}; the images have {counted(self.in_chans, 'channel')}, give one number for each"
            )
        self.mean: tuple[float, ...] = tuple(mean)
        self.std: tuple[float, ...] = tuple(std)
        training = train_transform(*self._augmentation(self.img_size))
        evaluation = eval_transform(self.img_size, self.mean, self.std, self.crop_pct)
        self.train_transform: v2.Compose = self.shape.adapt(training)
        self.eval_transform: v2.Compose = self.shape.adapt(evaluation)

    def _augmentation(self, size: tuple[int, int]) -> tuple[Any, ...]:
        """Arguments of `train_transform`."""
        return size, self.mean, self.std, self.augment, self.crop_pct, self.color_jitter, self.random_erasing

    @abstractmethod
    def missing(self, split: Split) -> str | None:
        """Explain why there is no such split and what to do, or return None if there is one. Reads no images."""

    @abstractmethod
    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of a split that is not missing, with the transform of :meth:`transform_of`."""

    def held_out(self) -> list[tuple[str, Label]]:
        """Names and labels of the training images that were held out for validation; empty where there are none."""
        return []

    def part_note(self, split: Split) -> str | None:
        """Say that a split is only the part of the images that is held out for validation; None: it is not."""
        if split != "val" or not (count := len(self.held_out())):
            return None
        return (
            f"the images have no val of their own, so val is a part of them, the {count} that a training holds out: to "
            "evaluate all, give them as val or test"
        )

    def manifest(self, split: Split) -> Iterator[ListedImage] | None:
        """List the images of train, val or test, so that a resumed training can compare them; None if they are unknown.

        This class can only list images in memory; :class:`relvit.app.data.ImageFilesData` lists image files.
        """
        dataset = self.dataset(split)
        return images_in_memory(dataset, self.class_names) if isinstance(dataset, StackedImages) else None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def class_weights(self) -> Tensor | None:
        """Factors on the loss of each class, float32 (num_classes,), if ``balance`` is 'loss'; otherwise None.

        A factor is ``images / (classes * images of the class)``, as with scikit-learn's 'balanced', and 0 for a class
        without training images, which does not count as one of the classes. So the mean factor over all training
        images is one. The first access may take long, because it looks for the training images.
        """
        return class_weights(self.dataset("train").targets, self.num_classes) if self.balance == "loss" else None

    @property
    def has_test(self) -> bool:
        """Return whether there is a test split; a folder counts, even if its files have not been looked at."""
        return self.missing("test") is None

    def dataset(self, split: Split) -> Dataset[Any]:
        """Return the dataset of one split, built at the first call.

        Raises:
            ValueError: There is no such split, it is empty, a file is missing or damaged, or `balance` needs `targets`.
            TypeError: A user's class has built an `IterableDataset`, or a dataset without a length.
        """
        if split not in self._datasets:
            if reason := self.missing(split):
                raise ValueError(reason)
            built = self.build(split)
            check_built(built, f"{split} of {type(self).__name__}", split == "train" and self.balance != "none")
            self._datasets[split] = built
        return self._datasets[split]

    def setup(self, stage: str | None = None) -> None:
        """Build the datasets of a stage: 'fit', 'validate', 'test' or 'predict'; None: all splits that exist.

        Raises:
            ValueError: The stage needs a split that does not exist, or a file that is missing or damaged.
        """
        if stage is None:
            splits = [split for split in ("train", "val", "test", "predict") if self.missing(split) is None]
        else:
            splits = (self.evaluated_split,) if stage == "test" else _SPLITS[stage]
        for split in splits:
            self.dataset(split)

    def evaluate_on(self, split: Split) -> None:
        """Choose the split that a test evaluates; images of train then come in order and without augmentation."""
        self.evaluated_split = split
        self._datasets.pop("train", None)

    def trains_on(self, split: Split) -> bool:
        """Return whether images of a split are shuffled and augmented: only train's, unless a test evaluates train."""
        return split == "train" and self.evaluated_split != "train"

    def transform_of(self, split: Split) -> v2.Compose:
        """Return the transform of the images of a split."""
        return self.train_transform if self.trains_on(split) else self.eval_transform

    def begin_at(self, epoch: int, batch: int) -> None:
        """Resume a training in this epoch, after this number of the epoch's batches on each device."""
        self._begin = (epoch, batch)

    def teardown(self, stage: str | None = None) -> None:
        """Forget where a training has resumed, so that the next training with this data module has all batches."""
        self._begin = (0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch of a training and the number of the epoch's batches that are done."""
        epoch, batch = training_position(self.trainer)
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume at the epoch and batch of :meth:`state_dict`."""
        self.begin_at(**state_dict)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches. A last batch of a single image is left out, since batch norm could not normalise it.

        The order depends only on seed and epoch, and the augmentation of an image also on its position in this order.
        If there are several devices, they divide the images of this order among them. A resumed training begins with
        the first batch of the epoch that it has not used yet.
        """
        if not self.trains_on("train"):
            raise ValueError("evaluate_on('train') gives train to a test: call evaluate_on('test') before a training")
        dataset = self.dataset("train")
        weights = None
        if self.balance == "sampler":
            weights = class_weights(dataset.targets, self.num_classes)[torch.as_tensor(dataset.targets)]
        # Give the sampler the epoch now, because workers may begin to load images before Lightning calls `set_epoch`.
        epoch, done = self._begin
        options = {"seed": run_seed()}
        if self.trainer is not None:
            options |= {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
            if self.trainer.current_epoch > epoch:
                epoch, done = self.trainer.current_epoch, 0
        options["epoch"] = epoch
        if self.train_sizes is not None:
            plan = self._size_plan(math.ceil(len(dataset) / options.get("num_replicas", 1)))
            sized = SizedBatchSampler(plan, len(dataset), weights, self.repeats, start=done, **options)
            return self._loader("train", sampler=sized)
        options["start"] = done * self.batch_size
        sampler = TrainSampler(len(dataset), weights, self.repeats, **options)
        alone = len(sampler) > 1 and len(sampler) % self.batch_size == 1
        return self._loader("train", sampler=sampler, drop_last=alone)

    def _size_plan(self, images: int) -> SizePlan:
        accumulated, limits, trainer = 1, (None, None), self.trainer
        if trainer is not None:
            accumulated, limits = trainer.accumulate_grad_batches, (trainer.max_epochs, trainer.max_steps)
        sizes = self.train_sizes, self.size_schedule, self.img_size, self.batch_size
        return SizePlan(*sizes, images, accumulated, run_seed(), *limits)

    def val_dataloader(self) -> DataLoader[Any] | EvalShardLoader:
        """All validation images in order; on several devices the shard of this one."""
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[Any] | EvalShardLoader:
        """All images of the evaluated split, by default test, in order; on several devices the shard of this one."""
        return self._eval_loader(self.evaluated_split)

    def predict_dataloader(self) -> DataLoader[Any] | EvalShardLoader:
        """All images to predict in order, with their names; on several devices the shard of this one."""
        return self._eval_loader("predict")

    def _eval_loader(self, split: Split) -> DataLoader[Any] | EvalShardLoader:
        if self.trainer is None or self.trainer.world_size == 1:
            return self._loader(split)
        world = self.trainer.world_size
        count = len(self.dataset(split))
        loader = self._loader(split, sampler=shard(count, self.trainer.global_rank, world))
        no_targets = [] if split == "predict" else torch.empty(0, dtype=torch.long)
        images = self.shape.empty(self.in_chans)
        largest_shard = len(shard(count, 0, world))
        return EvalShardLoader(loader, math.ceil(largest_shard / self.batch_size), (images, no_targets))

    def _loader(
        self, split: Split, sampler: Sampler | Sequence[int] | None = None, drop_last: bool = False
    ) -> DataLoader[Any]:
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "sampler": sampler,
            "drop_last": drop_last,
            "num_workers": self.num_workers,
            "pin_memory": torch.cuda.is_available(),
            "persistent_workers": self.num_workers > 0,
            # A DataLoader draws a seed for its workers, by default from PyTorch's global generator. With a generator of
            # its own, an evaluation does not change the random numbers of the user's training.
            "generator": None if self.trains_on(split) else torch.Generator("cpu"),
        }
        dataset, collate = self._items(split, self.img_size)
        if isinstance(sampler, SizedBatchSampler):
            dataset = SizedBatches({size: self._items(split, size)[0] for size in sampler.plan.sizes}, collate)
            options["batch_size"], collate = None, identity_collate
        if self.on_error != "skip":
            return SignalSafeDataLoader(dataset, collate_fn=collate, **options)
        record = self.unreadable.setdefault(split, {})
        return SkipUnreadableLoader(dataset, collate_fn=collate, record=record, **options)

    def _items(self, split: Split, size: tuple[int, int]) -> tuple[Dataset[Any], Callable[[Any], Any]]:
        """Return a dataset of images of one size, as a loader needs it, and the collate function of its items."""
        dataset, collate = self.dataset(split), self.shape.collate
        if size != self.img_size:
            dataset = with_transform(self, dataset, train_transform(*self._augmentation(size)))
        at_once = dataset.at_once() if isinstance(dataset, StackedImages) else None
        if at_once is not None:
            dataset, collate = at_once, identity_collate
        trains = self.trains_on(split)
        if self.on_error == "skip":
            wrapper = SkipUnreadable if at_once is None else SkipUnreadableBatches
            dataset = wrapper(dataset, replace=trains)
            collate = collate if at_once is not None else partial(collate_readable, collate=collate)
        return (DeterministicDataset(dataset, run_seed()) if trains else LoadedDataset(dataset)), collate
