"""Image files: which there are in folders, and datasets of them."""

import glob
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from relvit.data.files.folder_walk import walk_once, warn_about_classes
from relvit.data.files.images import IMAGE_ENDINGS, OTHER_ENDINGS, ImageSource, load_rgb
from relvit.utils.messages import did_you_mean, listing, printable

_ADD = "add images whose names end in .jpg, .png, .webp, .tif, .gif or the like"


def image_files(folder: str) -> list[str]:
    """Sorted paths of all files below a folder that have the ending of an image that can be read.

    Hidden files are left out. Images of other formats, by their endings, are left out with a warning.
    """
    images, others = _images_and_others(folder)
    _warn_about_formats(folder, others)
    return images


def images_to_predict(folder: str) -> list[str]:
    """The same, of which there must be some.

    Raises:
        ValueError: There are none.
    """
    paths = image_files(folder)
    if not paths:
        raise ValueError(f"no image below {folder}; {_ADD}")
    return paths


def find_images(paths: Iterable[str]) -> list[str]:
    """The image files that paths name, in the order of the paths, each once.

    Args:
        paths: Files, whatever their endings; folders, of which all images below them are taken, sorted; and patterns
            such as 'photos/*.jpg' or 'photos/**/*.png', of which all matches are taken, sorted.

    Raises:
        FileNotFoundError: There is nothing at a path.
        ValueError: A folder or a pattern without images.
    """
    found: dict[str, None] = {}
    for path in paths:
        path = os.path.expanduser(path)
        if os.path.isdir(path):
            found |= dict.fromkeys(images_to_predict(path))
        elif os.path.lexists(path):
            found[path] = None
        elif glob.has_magic(path):
            images = _matching(path)
            if not images:
                raise ValueError(f"no image matches the pattern {path!r}; {_ADD}")
            found |= dict.fromkeys(images)
        else:
            raise FileNotFoundError(f"no file or folder {path!r}; give image files, folders or patterns like '*.jpg'")
    return list(found)


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
    images = sum(entry.name.lower().endswith(IMAGE_ENDINGS) and not entry.is_dir() for entry in entries)
    if names:
        warn_about_classes(folder, names, images)
    else:
        found = f"{images} images are directly in {folder}" if images else f"{folder} is empty"
        raise ValueError(f"{found}; put the images of each class into a folder {os.path.join(folder, '<class>')}")
    return names


def labelled_files(folder: str, class_names: Sequence[str]) -> list[tuple[str, int]]:
    """Path and label of the images of ``folder/<class>/...``, by the class's name and not by the order of the folders.

    Classes without a folder are allowed.

    Raises:
        ValueError: No class folder, a folder that is no class, or a class folder without images.
    """
    labels = {name: label for label, name in enumerate(class_names)}
    samples, left_out = [], []
    for name in class_folders(folder):
        if name not in labels:
            hint = did_you_mean(name, class_names)
            raise ValueError(
                f"{os.path.join(folder, name)} is a class that the training data or the checkpoint does not "
                f"know{hint}; known are {listing(class_names)}: rename or remove the folder"
            )
        files, others = _images_and_others(os.path.join(folder, name))
        if not files:
            found = f" that can be read ({_counted(others)})" if others else ""
            raise ValueError(f"class folder {os.path.join(folder, name)} holds no image{found}; remove it or {_ADD}")
        samples += [(file, labels[name]) for file in files]
        left_out += others
    _warn_about_formats(folder, left_out)
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


def _images_and_others(folder: str) -> tuple[list[str], list[str]]:
    """Images below a folder that can be read, and those of other formats, by their endings."""
    found = files_below(folder, IMAGE_ENDINGS + OTHER_ENDINGS)
    images = [path for path in found if path.lower().endswith(IMAGE_ENDINGS)]
    return images, [path for path in found if not path.lower().endswith(IMAGE_ENDINGS)]


def _matching(pattern: str) -> list[str]:
    """Images that match a pattern, and all images below folders that do."""
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [path for path in matches if not os.path.isdir(path)]
    _warn_about_formats(pattern, [path for path in files if path.lower().endswith(OTHER_ENDINGS)])
    images = [path for path in files if path.lower().endswith(IMAGE_ENDINGS)]
    # What is below the folders that match `**` matches it itself.
    folders = [] if "**" in pattern else [path for path in matches if os.path.isdir(path)]
    return images + [image for folder in folders for image in image_files(folder)]


def _warn_about_formats(place: str, left_out: Sequence[str]) -> None:
    if left_out:
        text = f"{printable(place)}: {_counted(left_out)}; save them in a format that is read, such as PNG or JPEG"
        warnings.warn(text, stacklevel=3)


def _counted(left_out: Sequence[str]) -> str:
    """How many files of which endings, such as '12 files left out: 10 .psd, 2 .heic'."""
    endings = Counter(os.path.splitext(path)[1].lower() for path in left_out).most_common()
    total = f"{len(left_out)} {'file' if len(left_out) == 1 else 'files'} left out"
    return f"{total}: {', '.join(f'{count} {ending}' for ending, count in endings)}"
