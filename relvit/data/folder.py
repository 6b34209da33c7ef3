"""Photographs in folders, one folder per class."""

import os
from collections.abc import Sequence
from functools import cached_property

from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from relvit.data.base import ImageData, Split
from relvit.data.files import LabelledFolder, NamedImages, class_folders, image_files, stratified_split
from relvit.data.transforms import Augment
from relvit.names import listing

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_FOLDER_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}


class ImageFolderData(ImageData):
    """Images in ``root/train/<class>/...``, ``root/val/<class>/...`` and ``root/test/<class>/...``.

    The folder of val may also be named valid or validation; without one, a part of train is put aside. All images
    are read as RGB. Classes are matched by name, so a split may lack some. Predict gives, without labels, the
    images below test or else below val; if root has none of these folders, all images below root. Hidden files and
    folders are left out.

    Args:
        root: The folder that holds train, val and test.
        img_size: Size of the images given to the model, one number or (height, width).
        batch_size: Images per batch (and per device).
        num_workers: Processes that load images; 0 loads them in the main process.
        augment: Augmentation of the training images, see :func:`relvit.data.train_transform`.
        crop_pct: Share of the side that the centre crop of evaluation keeps, in (0, 1].
        mean: Mean of red, green and blue, in units of the range 0..1.
        std: Standard deviation of red, green and blue, in the same units.
        val_fraction: Share of each class of train that is put aside where there is no val folder, in (0, 1).
        split_seed: Another seed puts other images aside; the seed of the training has no part in it.
        class_names: Name of each class, the position is the label (a checkpoint knows them); None takes the sorted
            folders in train. Where they are given, train need not exist.

    Raises:
        FileNotFoundError: root is missing, or there is no train folder and class_names is None.
        ValueError: An argument out of its range, fewer than two classes, or images outside class folders.
    """

    def __init__(
        self,
        root: str,
        img_size: int | tuple[int, int] = 224,
        batch_size: int = 64,
        num_workers: int = 2,
        augment: Augment = "resized-crop",
        crop_pct: float = 0.9,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        class_names: list[str] | None = None,
    ) -> None:
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction is {val_fraction}; it is the share of train, 0 < val_fraction < 1")
        # Absolute: a checkpoint remembers it, and may be used from elsewhere.
        self.root = os.path.abspath(os.path.expanduser(root))
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self._folders = _find_splits(self.root)
        super().__init__(
            class_names=self._train_classes() if class_names is None else class_names,
            in_chans=3,
            img_size=img_size,
            batch_size=batch_size,
            num_workers=num_workers,
            augment=augment,
            crop_pct=crop_pct,
            mean=mean,
            std=std,
        )

    def missing(self, split: Split) -> str | None:
        """Which folder is missing, or None."""
        if split == "predict":
            only_train = list(self._folders) == ["train"]
            return (
                f"no test or val folder in {self.root}; add one, or give a folder of images (--data.root)"
                if only_train
                else None
            )
        if split in self._folders or (split == "val" and "train" in self._folders):
            return None
        return f"no {split} folder in {self.root}; add the images as {os.path.join(self.root, split, '<class>')}/..."

    def build(self, split: Split) -> Dataset:
        """The dataset of one split; looks for its files."""
        if split == "predict":
            return self._build_predict()
        transform = self.train_transform if split == "train" else self.eval_transform
        if split == "train" or (split == "val" and "val" not in self._folders):
            larger, smaller = self._divided
            return self._train.part(larger if split == "train" else smaller, transform)
        folder = LabelledFolder(self._folders[split], self.class_names)
        return folder.part(range(len(folder)), transform)

    def _build_predict(self) -> Dataset:
        folder = self._folders.get("test") or self._folders.get("val") or self.root
        paths = image_files(folder)
        if not paths:
            raise ValueError(f"no image below {folder}; add files that end in {', '.join(IMG_EXTENSIONS)}")
        return NamedImages(paths, self.eval_transform)

    @cached_property
    def _train(self) -> LabelledFolder:
        """All images of the train folder, walked once for both of its parts."""
        folder = LabelledFolder(self._folders["train"], self.class_names)
        absent = sorted(set(self.class_names) - {self.class_names[label] for label in folder.targets})
        if absent:
            raise ValueError(
                f"{folder.root} has no folder for the classes {absent} of class_names; "
                "add them, or leave class_names out to train on the classes that are there"
            )
        return folder

    @cached_property
    def _divided(self) -> tuple[Sequence[int], Sequence[int]]:
        """Indices in the train folder of the images to train on and of those put aside to validate."""
        if "val" in self._folders:
            return range(len(self._train)), ()
        return stratified_split(self._train, self.val_fraction, self.split_seed)

    def _train_classes(self) -> list[str]:
        if "train" in self._folders:
            return class_folders(self._folders["train"])
        entries = [entry for entry in os.scandir(self.root) if not entry.name.startswith(".")]
        images = sum(entry.name.lower().endswith(IMG_EXTENSIONS) for entry in entries)
        folders = sorted(entry.name for entry in entries if entry.is_dir())
        expected = f"expected {os.path.join(self.root, 'train', '<class>', '<image>')}"
        if images:
            raise ValueError(
                f"{images} images lie directly in {self.root}, without class folders; {expected}, "
                "or give class_names (a checkpoint knows them) to predict"
            )
        raise FileNotFoundError(
            f"no train folder in {self.root}, which holds {listing(folders) or 'no folders'}; {expected}, "
            "or give class_names (a checkpoint knows them)"
        )


def _find_splits(root: str) -> dict[Split, str]:
    """The folder of each split that root has."""
    if not os.path.isdir(root):
        raise FileNotFoundError(
            f"root {root} is no folder; give the one that holds train/<class>/<image>, or the images to predict "
            "(--data.root)"
        )
    found: dict[Split, str] = {}
    for split, names in _FOLDER_NAMES.items():
        folders = [path for name in names if os.path.isdir(path := os.path.join(root, name))]
        if len(folders) > 1:
            raise ValueError(f"{' and '.join(folders)} both hold validation images; keep one")
        if folders:
            found[split] = folders[0]
    return found
