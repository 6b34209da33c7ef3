"""ImageFolderData: images in one folder per class, in folders train, val and test or in one folder alone."""

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from relvit.app.data.class_labels import check_every_class
from relvit.app.data.images.folders import (
    LIST_ENDINGS,
    class_folders,
    has_images,
    images_to_predict,
    labelled_files,
    look_into,
)
from relvit.app.data.modules.base import Split
from relvit.app.data.modules.image_files import ImageFilesData
from relvit.app.utils.files import kept_path
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import listing

_FOLDER_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}


class ImageFolderData(ImageFilesData):
    """Images in ``root/train/<class>/...``, ``root/val/<class>/...`` and ``root/test/<class>/...``.

    The folder val may also be named valid or validation; if there is no such folder, a part of train is held out. If
    root has none of these folders, but two or more folders that directly contain images, root itself is the train
    folder. Classes are matched by name, so a split need not have all classes. Predict yields images without labels: the
    images below test, or below val if there is no test; if root has none of the three folders, all images below root.
    Hidden files and folders are left out, and so is a folder of relvit's runs among the folders of classes.

    Args:
        root: The folder that holds train, val and test, or one folder for each class.
        class_names: Name of each class; the label of a class is its index in this list. A checkpoint stores these
            names. None takes the names of the folders in train, sorted. If class_names are given, the folder train need
            not exist.
        options: See :class:`relvit.app.data.ImageFilesData`.

    Raises:
        FileNotFoundError: root is missing, or there is no train folder and class_names is None.
        ValueError: An argument is out of its range, there are fewer than two classes, or images are outside class
            folders.
    """

    def __init__(self, root: str, class_names: list[str] | None = None, **options: Any) -> None:
        self.root: str = kept_path(root)
        self._folders = find_splits(self.root)
        if not self._folders and _holds_classes(self.root):
            self._folders = {"train": self.root}
        self._classes_given: bool = class_names is not None
        super().__init__(self._train_classes() if class_names is None else class_names, **options)

    @property
    def _folder_classes(self) -> Sequence[str]:
        """Name of the folder of each class."""
        return self.class_names

    def missing(self, split: Split) -> str | None:
        """Explain which folder is missing, or return None."""
        if split == "predict":
            if list(self._folders) == ["train"] and not self._classes_in_root():
                return f"no test or val folder in {self.root}; add one, or give a folder of images (--data.root)"
            return None
        if self._has_own(split):
            return None
        parent, name = os.path.split(self.root)
        # Without a folder val, a part of train is held out, even if root itself is called train. If root is called val
        # or test, the user has likely given one split instead of the folder that contains all splits.
        held_out = split == "val" and self._has_own("train")
        is_split = name in sum(_FOLDER_NAMES.values(), ()) and not (held_out and name in _FOLDER_NAMES["train"])
        if is_split and split in find_splits(parent):
            return f"no {split} folder in {self.root}; give the folder that holds it, {parent} (--data.root)"
        if held_out:
            return None
        # As soon as root has a folder test, root itself no longer counts as the train folder, so the message also tells
        # the user where to move the class folders.
        move = f"move the class folders into {self.root}/{split}, or into {self.root}/train and "
        move = move if self._classes_in_root() else ""
        return f"no {split} folder in {self.root}; {move}add the images as {self.root}/{split}/<class>/..."

    def _has_own(self, split: Split) -> bool:
        return split in self._folders

    def _classes_in_root(self) -> bool:
        return self._folders.get("train") == self.root

    def _samples(self, split: Split) -> list[tuple[str, int]]:
        folder = self._folders[split]
        labels = {name: label for label, name in enumerate(self._folder_classes)}
        samples = labelled_files(folder, labels, every=split == "train" and self._classes_given)
        if split == "train":
            check_every_class((label for _, label in samples), self._folder_classes, folder)
        return samples

    def _paths_to_predict(self) -> list[str]:
        return images_to_predict(self._folders.get("test") or self._folders.get("val") or self.root)

    def _display_name(self, path: str) -> str:
        return Path(os.path.relpath(path, self.root)).as_posix()

    def _split_key(self, path: str) -> str:
        return Path(os.path.relpath(path, self._folders["train"])).as_posix()

    def _name_in_split(self, path: str, split: Split) -> str:
        folder = self._folders[split if self._has_own(split) else "train"]
        return path.removeprefix(os.path.join(folder, ""))

    def _doubts(self, counts: Mapping[str, int]) -> list[str]:
        # Beside class folders there are no splits: each folder is a class.
        unused = {} if self._classes_in_root() else self._unused(look_into(self.root)[0])
        return super()._doubts(counts) + [
            f"the folder {name} in {self.root} is not used: if it holds {split}, name it {split}"
            for split, name in unused.items()
        ]

    @property
    def place(self) -> str:
        """The folder root."""
        return self.root

    def _train_classes(self) -> list[str]:
        if "train" in self._folders:
            return class_folders(self._folders["train"])
        folders, images = look_into(self.root)
        wanted = os.path.join(self.root, "train", "<class>", "<image>")
        expected = f"expected {wanted}, or two class folders with images directly in them, without train"
        if images and not folders:
            raise ValueError(
                f"{self.root} has {counted(images, 'image')} directly in it, without class folders; {expected}, "
                "or give class_names (a checkpoint knows them) to predict"
            )
        raise FileNotFoundError(
            f"no train folder in {self.root}, which holds {listing(folders) or 'no folders'}; {expected}, "
            "or give class_names (a checkpoint knows them)"
        )


def _holds_classes(root: str) -> bool:
    """Return True if two or more folders directly in root contain images."""
    with_images = (name for name in look_into(root)[0] if has_images(os.path.join(root, name)))
    return len(list(islice(with_images, 2))) == 2


def find_splits(root: str) -> dict[Split, str]:
    """Find the folder of each split below root.

    Raises:
        FileNotFoundError, NotADirectoryError: root does not exist, or is not a folder.
        ValueError: There are two folders with validation images.
    """
    if os.path.isfile(root):
        if root.lower().endswith(LIST_ENDINGS):
            raise NotADirectoryError(
                f"root {root} is a list; give it by --data ImageListData and --data.train, --data.val or --data.test"
            )
        raise NotADirectoryError(f"root {root} is a file; give the folder of images that it is in (--data.root)")
    if not os.path.isdir(root):
        raise FileNotFoundError(
            f"root {root} is not a folder; give the one that holds train/<class>/<image>, or the images to predict "
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
