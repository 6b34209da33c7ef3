"""CIFAR10Data and CIFAR100Data: download, check and read the authors' files by torchvision."""

import os
import warnings
from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity

from relvit.app.data.class_labels import check_class_names
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.modules.base import ImageData, Split
from relvit.app.data.split import stratified_split
from relvit.app.data.transforms import Augment
from relvit.app.utils.files import kept_path
from relvit.app.utils.number_types import OpenShare, check_ranges

# Names split from one text are easier to read than a list of quoted names, so ruff's rule SIM905 is ignored twice.
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()  # noqa: SIM905
CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
""".split()  # noqa: SIM905


class CIFARData(ImageData):
    """CIFAR-10 or CIFAR-100: 50,000 images of 32 x 32 to train, 10,000 to test, all kept in memory.

    The files come from https://www.cs.toronto.edu/~kriz/cifar.html, lie below `root` as torchvision stores them, and
    are checked by their MD5 sums. If files are missing, :meth:`prepare_data` (which Lightning calls in one process of
    each machine) unpacks the archive in `root`, or downloads it. A part of train is held out for validation. Predict
    yields the test images, named 'cifar10/test/00000' and so on.

    The augmentations 'none', 'shift' and 'crop-flip' transform whole batches, which is faster than one image after the
    other. With `native` they transform single images.

    Args:
        root: The folder that holds, or is to hold, the files.
        download: Whether missing files may be downloaded (170 MB).
        img_size: Size of the images given to the model, one number or (height, width).
        augment: Augmentation of the training images, see :func:`relvit.app.data.train_transform`.
        val_fraction: Share of each class of train that is held out, in (0, 1).
        split_seed: Another seed holds out other images. The seed of the training does not matter here.
        class_names: None, or the class names of a checkpoint, which must be equal to CIFAR's class names.
        options: See :class:`relvit.app.data.ImageData`.

    Raises:
        ValueError: An argument is out of its range, or `class_names` are not CIFAR's; or, when the images are first
            used, a file is missing or damaged.
    """

    dataset_class: ClassVar[type[CIFAR10]]

    def __init__(
        self,
        root: str = "data",
        download: bool = True,
        img_size: int | tuple[int, int] = 32,
        augment: Augment = "crop-flip",
        val_fraction: OpenShare = 0.1,
        split_seed: int = 0,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        check_ranges(CIFARData.__init__, locals())
        self.check_options(options)
        self._title = self.dataset_class.__name__.replace("CIFAR", "CIFAR-")
        check_class_names(class_names, self.classes, f"{self._title} has")
        self.root: str = kept_path(root)
        self.download = download
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        super().__init__(self.classes, 3, img_size=img_size, augment=augment, **options)

    @property
    @abstractmethod
    def classes(self) -> list[str]:
        """Names of the classes."""

    @property
    def _folder(self) -> str:
        return os.path.join(self.root, self.dataset_class.base_folder)

    @property
    def _archive(self) -> str:
        return os.path.join(self.root, self.dataset_class.filename)

    def prepare_data(self) -> None:
        """Let torchvision unpack or download missing files.

        Raises:
            ValueError: A file is damaged, or the images are missing and may not be downloaded.
        """
        # If an intact archive is there already, torchvision only unpacks it, so let torchvision do this even if
        # `download` is False.
        may_repair = self.download or check_integrity(self._archive, self.dataset_class.tgz_md5)
        if self.download and not os.path.exists(self._folder) and not os.path.exists(self._archive):
            print(f"{self._title} is not in {self.root}: downloading {self.dataset_class.url}", flush=True)
        self._open(train=False, download=may_repair)

    def _open(self, train: bool, download: bool = False) -> CIFAR10:
        with warnings.catch_warnings():
            # Ignore NumPy's warning that the pickle files of CIFAR's authors describe a dtype in an outdated way: users
            # cannot change these files.
            warnings.filterwarnings("ignore", message=".*align should be passed")
            try:
                return self.dataset_class(self.root, train=train, download=download)
            # torchvision raises this error both for missing files and for wrong MD5 sums, so `_complaint` finds out
            # which.
            except RuntimeError as error:
                raise ValueError(self._complaint()) from error

    def _complaint(self) -> str:
        damaged = f"is damaged: its MD5 sum is not that of {self._title}; delete"
        if os.path.isdir(self._folder):
            file = f"a file in {self._folder} is missing or"
            return f"{file} {damaged} the folder, so that it is unpacked or downloaded again"
        if os.path.exists(self._archive):
            return f"{self._archive} {damaged} it and download it again"
        url = self.dataset_class.url
        return f"no {self._title} in {self.root}: set download (--data.download true), or put {url} there"

    def missing(self, split: Split) -> str | None:
        """Explain that the images are missing, or return None."""
        if os.path.isdir(self._folder):
            return None
        return f"no {self._title} in {self.root}: call prepare_data() first, as Lightning does"

    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of one split, in memory."""
        if split in ("train", "val"):
            stored, chosen = self._train_files, self._divided[split == "val"]
        else:
            stored = self._open(train=False)
            chosen = range(len(stored.targets))
        targets = [self._name("test", i) if split == "predict" else stored.targets[i] for i in chosen]
        return StackedImages(torch.from_numpy(stored.data[chosen]), targets, self.transform_of(split))

    def held_out(self) -> list[tuple[str, int]]:
        """Names such as 'cifar10/train/00012', by the index in the training files, and labels."""
        return [(self._name("train", i), self._train_files.targets[i]) for i in self._divided[1]]

    @cached_property
    def _divided(self) -> tuple[list[int], list[int]]:
        labels = self._train_files.targets
        names = [self._name("train", i) for i in range(len(labels))]
        return stratified_split(names, labels, self.val_fraction, self.split_seed, self.root)

    @cached_property
    def _train_files(self) -> CIFAR10:
        return self._open(train=True)

    def _name(self, part: str, index: int) -> str:
        return f"{self.dataset_class.__name__.lower()}/{part}/{index:05d}"


class CIFAR10Data(CIFARData):
    """CIFAR-10 (Krizhevsky 2009): 32 x 32 colour images of ten classes, 5,000 each to train and 1,000 to test.

    For arguments and files see :class:`CIFARData`.
    """

    dataset_class: ClassVar[type[CIFAR10]] = CIFAR10
    classes = CIFAR10_CLASSES
    channels: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]] = (
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    )


class CIFAR100Data(CIFARData):
    """CIFAR-100 (Krizhevsky 2009): 32 x 32 colour images of 100 fine classes, 500 each to train and 100 to test.

    For arguments and files see :class:`CIFARData`.
    """

    dataset_class: ClassVar[type[CIFAR10]] = CIFAR100
    classes = CIFAR100_CLASSES
    channels: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]] = (
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    )
