"""Image files: which there are in folders, and datasets of them."""

import os
from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from relvit.data.folder_walk import walk_once, warn_about_classes
from relvit.data.images import ImageSource, load_rgb
from relvit.names import did_you_mean, listing


def image_files(folder: str) -> list[str]:
    """Sorted paths of all files below a folder that have the extension of an image; hidden ones are left out."""
    return files_below(folder, IMG_EXTENSIONS)


def images_to_predict(folder: str) -> list[str]:
    """The same, of which there must be some.

    Raises:
        ValueError: There are none.
    """
    paths = image_files(folder)
    if not paths:
        raise ValueError(f"no image below {folder}; add files that end in {', '.join(IMG_EXTENSIONS)}")
    return paths


def files_below(folder: str, endings: tuple[str, ...]) -> list[str]:
    """Sorted paths of all files below a folder that end so, in lower or upper case; hidden ones are left out."""
    found = []
    for parent, names in walk_once(folder):
        found += [os.path.join(parent, name) for name in names if name.lower().endswith(endings)]
    return sorted(found)


def class_folders(folder: str) -> list[str]:
    """Sorted names of the folders right inside a folder, one for each class; hidden ones are left out.

    Raises:
        ValueError: There are none.
    """
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in entries if entry.is_dir())
    images = sum(entry.name.lower().endswith(IMG_EXTENSIONS) and not entry.is_dir() for entry in entries)
    if names:
        warn_about_classes(folder, names, images)
    else:
        found = f"{images} images lie directly in {folder}" if images else f"{folder} is empty"
        raise ValueError(f"{found}; put the images of each class into a folder {os.path.join(folder, '<class>')}")
    return names


def labelled_files(folder: str, class_names: Sequence[str]) -> list[tuple[str, int]]:
    """Path and label of the images of ``folder/<class>/...``, by the class's name and not by the order of the folders.

    Classes without a folder are allowed.

    Raises:
        ValueError: No class folder, a folder that is no class, or a class folder without images.
    """
    labels = {name: label for label, name in enumerate(class_names)}
    samples = []
    for name in class_folders(folder):
        if name not in labels:
            hint = did_you_mean(name, class_names)
            raise ValueError(
                f"{os.path.join(folder, name)} is a class that the training data or the checkpoint does not "
                f"know{hint}; known are {listing(class_names)}: rename or remove the folder"
            )
        files = image_files(os.path.join(folder, name))
        if not files:
            raise ValueError(
                f"class folder {os.path.join(folder, name)} holds no image; "
                f"remove it or add files that end in {', '.join(IMG_EXTENSIONS)}"
            )
        samples += [(file, labels[name]) for file in files]
    return samples


class LabelledFiles(Dataset):
    """Image files with labels. Items are ``(image, label)``.

    Args:
        samples: Path, or stored image, and label of each.
        transform: From a PIL image of mode 'RGB' to a tensor.
    """

    def __init__(self, samples: Sequence[tuple[ImageSource, int]], transform: v2.Compose) -> None:
        self.samples = list(samples)
        self.targets = [label for _, label in self.samples]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.transform(load_rgb(path)), label

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} images\n{self.transform}"


class NamedFiles(Dataset):
    """Image files without labels. Items are ``(image, path)``.

    Args:
        paths: The files; stored images are called by their names.
        transform: From a PIL image of mode 'RGB' to a tensor.
    """

    def __init__(self, paths: Sequence[ImageSource], transform: v2.Compose) -> None:
        self.paths = list(paths)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        path = self.paths[index]
        return self.transform(load_rgb(path)), str(path)
