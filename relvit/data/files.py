"""Image files in folders: which there are, and datasets of them."""

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

from relvit.data.images import load_rgb
from relvit.names import did_you_mean, listing


def image_files(folder: str) -> list[str]:
    """Sorted paths of all files below a folder that have the extension of an image; hidden ones are left out."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        # .ipynb_checkpoints holds copies, and macOS puts ._name.jpg next to name.jpg, which is no image
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = (name for name in names if not name.startswith("."))
        found += [os.path.join(parent, name) for name in visible if name.lower().endswith(IMG_EXTENSIONS)]
    return sorted(found)


def class_folders(folder: str) -> list[str]:
    """Sorted names of the folders right inside a folder, one for each class; hidden ones are left out.

    Raises:
        ValueError: There are none.
    """
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        images = sum(entry.name.lower().endswith(IMG_EXTENSIONS) for entry in entries)
        found = f"{images} images lie directly in {folder}" if images else f"{folder} is empty"
        raise ValueError(f"{found}; put the images of each class into a folder {os.path.join(folder, '<class>')}")
    return names


class LabelledFolder(ImageFolder):
    """The images of ``root/<class>/...``, labelled by the class's name and not by the order of the folders.

    Items are ``(image, label)``.

    Args:
        root: The folder that holds the class folders; classes without a folder are allowed.
        class_names: Name of each class; the position is the label.

    Raises:
        ValueError: No class folder, a folder that is no class, or a class folder without images.
    """

    def __init__(self, root: str, class_names: list[str]) -> None:
        self._class_names = class_names
        super().__init__(root, loader=load_rgb, allow_empty=True)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        for name in class_folders(str(directory)):
            if name not in self._class_names:
                hint = did_you_mean(name, self._class_names)
                raise ValueError(
                    f"{os.path.join(directory, name)} is a class that the training data or the checkpoint does not "
                    f"know{hint}; known are {listing(self._class_names)}: rename or remove the folder"
                )
        return self._class_names, {name: label for label, name in enumerate(self._class_names)}

    @staticmethod
    def make_dataset(directory: str | Path, class_to_idx: dict[str, int], **_: Any) -> list[tuple[str, int]]:
        samples = []
        for name in class_folders(str(directory)):
            files = image_files(os.path.join(directory, name))
            if not files:
                raise ValueError(
                    f"class folder {os.path.join(directory, name)} holds no image; "
                    f"remove it or add files that end in {', '.join(IMG_EXTENSIONS)}"
                )
            samples += [(file, class_to_idx[name]) for file in files]
        return samples

    def part(self, indices: Sequence[int], transform: v2.Compose) -> Self:
        """The items at some indices, with a transform of their own."""
        part = copy.copy(self)
        part.samples = part.imgs = [self.samples[i] for i in indices]
        part.targets = [label for _, label in part.samples]
        part.transform = transform
        part.transforms = StandardTransform(transform)  # torchvision's second record of it, shown by repr
        return part


class NamedImages(Dataset):
    """Image files without labels. Items are ``(image, path)``.

    Args:
        paths: The files.
        transform: From a PIL image of mode 'RGB' to a tensor.
    """

    def __init__(self, paths: list[str], transform: v2.Compose) -> None:
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        path = self.paths[index]
        return self.transform(load_rgb(path)), path


def stratified_split(folder: LabelledFolder, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the larger and the smaller part of a folder, each class divided in the same proportion.

    Of each class ``round(n * fraction)`` images go to the smaller part, at least one and at most n - 1; a class of
    one image keeps it in the larger part. The choice follows a hash of the seed and the path below the folder: it
    depends on no random state, machine or location, and an added image changes the place of few others.

    Raises:
        ValueError: The smaller part is empty since every class has one image.
    """

    def rank(index: int) -> str:
        below = Path(folder.samples[index][0]).relative_to(folder.root).as_posix()
        return hashlib.sha256(f"{seed}/{below}".encode()).hexdigest()

    wanted = {n_class: min(max(1, round(n * fraction)), n - 1) for n_class, n in Counter(folder.targets).items()}
    larger, smaller = [], []
    for index in sorted(range(len(folder)), key=rank):
        label = folder.targets[index]
        if wanted[label] > 0:
            wanted[label] -= 1
            smaller.append(index)
        else:
            larger.append(index)
    if not smaller:
        raise ValueError(f"every class of {folder.root} has one image, so none can be put aside; add a val folder")
    return sorted(larger), sorted(smaller)
