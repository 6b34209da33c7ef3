"""Walk folders: find image files, class folders and their labels, and warn of files that are left out."""

import glob
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from relvit.app.data.class_labels import check_printable
from relvit.app.data.images.decode import IMAGE_ENDINGS, OTHER_ENDINGS
from relvit.app.utils.files import absolute, is_exported
from relvit.app.utils.shown_text import counted, visible
from relvit.utils.messages import did_you_mean, listing

# Files with these endings hold lists of images, see `relvit.app.data.ImageListData`.
LIST_ENDINGS = (".csv", ".tsv", ".parquet")

# The name of a run's folder begins with a date and a time, see `relvit.app.training.new_run_folder`. The folder of each
# run that has ended has one of these files or folders.
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_")
ARTIFACTS = ("metrics.csv", "predictions.csv", "checkpoints", "classes.csv", "summary.json", "unreadable.csv")

_ADD = "add images whose names end in .jpg, .png, .webp, .tif, .gif or the like"


def walk_once(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Walk `folder` and each folder below it once, with the names of the files directly in it; skip hidden names.

    Folders of relvit's runs below `folder` are skipped, too, because their figures are not the user's images. Links to
    folders are followed, but no folder is visited twice, because links may form circles. Parents of `folder` are never
    visited: otherwise a class folder with a link to its parent would include the images of all classes. A folder that
    can be reached directly and by a link is returned with its direct path.

    Raises:
        OSError: A folder cannot be listed.
    """
    if not os.path.isdir(folder):
        return
    seen = {_identity(parent) for parent in Path(os.path.realpath(folder)).parents}
    # The loop appends links to folders to this list, so it follows them only after all folders that it reaches without
    # links.
    waiting = [folder]
    for start in waiting:
        links: list[str] = []
        for parent, folders, names in os.walk(start, onerror=_raise):
            if (identity := _identity(parent)) in seen:
                folders.clear()
                continue
            seen.add(identity)
            # Skip hidden names: .ipynb_checkpoints contains copies of images, and macOS puts a file ._name.jpg, which
            # is not an image, next to name.jpg.
            paths = {name: os.path.join(parent, name) for name in sorted(folders) if not name.startswith(".")}
            folders[:] = [name for name, path in paths.items() if not _is_run(path)]
            links += [paths[name] for name in folders if os.path.islink(paths[name])]
            yield parent, [name for name in names if not name.startswith(".")]
        waiting += sorted(links)


def files_below(folder: str, endings: tuple[str, ...]) -> list[str]:
    """Return sorted paths of the files below a folder with these endings, in any case, without hidden files."""
    paths = (os.path.join(parent, name) for parent, names in walk_once(folder) for name in names)
    return sorted(path for path in paths if path.lower().endswith(endings))


def image_files(folder: str) -> list[str]:
    """Sorted paths of all files below a folder with the ending of an image; warn of image formats that are not read."""
    images, others = _images_and_others(folder)
    _warn_about_formats(folder, others)
    return images


def images_to_predict(folder: str) -> list[str]:
    """Sorted paths of the image files below a folder.

    Raises:
        ValueError: There are no images below the folder.
    """
    paths = image_files(folder)
    if not paths:
        raise ValueError(f"no image below {folder}; {_ADD}")
    return paths


def find_images(paths: Iterable[str]) -> list[str]:
    """Find the image files that paths name, in the order of the paths, each once.

    Args:
        paths: Files with any ending; folders, which stand for all images below them, sorted; and patterns such as
            'photos/*.jpg' or 'photos/**/*.png', which stand for all matching files, sorted, then for all images below
            matching folders.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: There are no images below a folder, no image matches a pattern, or a path is the file of a list,
            of an archive or of a model.
    """
    found: dict[str, None] = {}
    for path in map(os.path.expanduser, paths):
        if path.lower().endswith(LIST_ENDINGS) and os.path.isfile(path):
            raise ValueError(
                f"{path} is a list, not an image: give images or folders, or in the place of {path} for predict "
                f"--data ImageListData --data.predict {path}"
            )
        if path.endswith(".ckpt") or is_exported(path):
            raise ValueError(f"{path} is a model, not an image: give one model at a time, then images or folders")
        if path.lower().endswith((".tar", ".zip", ".tar.gz", ".tgz")) and os.path.isfile(path):
            raise ValueError(f"{path} is an archive, not an image: unpack it and give the folder")
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
            folder, name = os.path.split(path)
            near = did_you_mean(name, os.listdir(folder or ".")) if os.path.isdir(folder or ".") else ""
            raise FileNotFoundError(
                f"no file or folder {path!r}{near}; give image files, folders or patterns like '*.jpg'"
            )
    # Keep each file once, even if it is given in two spellings, such as a.jpg and ./a.jpg.
    once: dict[str, str] = {}
    for path in found:
        once.setdefault(absolute(path), path)
    return list(once.values())


def look_into(folder: str) -> tuple[list[str], int]:
    """Return the sorted names of the folders directly in a folder, and the number of images; skip hidden names."""
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in entries if entry.is_dir())
    return names, sum(entry.name.lower().endswith(IMAGE_ENDINGS) and not entry.is_dir() for entry in entries)


def has_images(folder: str) -> bool:
    """Return True if images are directly in a folder, not in a folder below it."""
    # The folder of a class may hold very many files, so stop at the first image instead of listing all of them.
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(IMAGE_ENDINGS) for entry in entries)


def class_folders(folder: str) -> list[str]:
    """Return the sorted names of the folders directly in a folder, one for each class, without hidden folders.

    A folder of relvit's runs is no class: a user may have trained in the folder of the images. Warn of such a folder,
    and of images beside the class folders.

    Raises:
        ValueError: There are no class folders, or the name of a class folder cannot be printed.
    """
    names, images = look_into(folder)
    for name in [name for name in names if _holds_runs(os.path.join(folder, name))]:
        names.remove(name)
        warnings.warn(f"{visible(os.path.join(folder, name))} holds runs of relvit and is not a class", stacklevel=2)
    check_printable(names, folder)
    if not names:
        found = f"{folder} has {counted(images, 'image')} directly in it" if images else f"{folder} is empty"
        raise ValueError(f"{found}; put the images of each class into a folder {os.path.join(folder, '<class>')}")
    if images:
        warnings.warn(
            f"{images} {'image is' if images == 1 else 'images are'} beside the class folders of {visible(folder)} "
            "and will not be used as one of a class: move them into class folders, or away",
            stacklevel=2,
        )
    return names


def _is_run(folder: str) -> bool:
    """Return whether a folder is that of a run; a camera's folder may have such a name, but has no such files."""
    named = _RUN.match(os.path.basename(folder))
    # A training writes `run.json` before its first figure.
    return named is not None and any(os.path.exists(os.path.join(folder, name)) for name in ("run.json", *ARTIFACTS))


def _holds_runs(folder: str) -> bool:
    """Return whether a folder holds folders of runs and nothing else, except for hidden names.

    The folder of a run that has just begun is still empty; a camera's folder of such a name has images.
    """
    # The folder of a class may hold very many files, so stop at the first other name instead of listing all of them.
    found = False
    with os.scandir(folder) as entries:
        for entry in entries:
            named = _RUN.match(entry.name) and entry.is_dir()
            if named and (_is_run(entry.path) or not has_images(entry.path)):
                found = True
            elif not entry.name.startswith("."):
                return False
    return found


def folders_of_classes(folder: str) -> list[str]:
    """Return the sorted paths of the folders, `folder` or below it, that contain class folders, which contain images.

    Raises:
        ValueError: There are neither folders nor images in a folder.
    """
    inside = [os.path.join(folder, name) for name in class_folders(folder)]
    if any(map(has_images, inside)):
        return [folder]
    return [found for path in inside for found in folders_of_classes(path)]


def labelled_files(folder: str, labels: Mapping[str, int], every: bool = False) -> list[tuple[str, int]]:
    """Path and label of the images of ``folder/<class>/...``.

    Args:
        folder: The folder that holds the class folders.
        labels: Label of each class folder by its name; classes without a folder are allowed.
        every: Whether the caller refuses classes without images. Then the error does not advise to remove a folder.

    Raises:
        ValueError: There is no class folder, a folder is not a class, or a class folder has no images.
    """
    samples, left_out = [], []
    for name in class_folders(folder):
        if name not in labels:
            hint = did_you_mean(name, labels)
            raise ValueError(
                f"{os.path.join(folder, name)} is a class that the training data or the checkpoint does not "
                f"know{hint}; known are {listing(list(labels))}: rename or remove the folder"
            )
        files, others = _images_and_others(os.path.join(folder, name))
        if not files:
            found = f" that can be read ({_counted(others)})" if others else ""
            cure = _ADD if every else f"remove it or {_ADD}"
            raise ValueError(f"class folder {os.path.join(folder, name)} holds no image{found}; {cure}")
        samples += [(file, labels[name]) for file in files]
        left_out += others
    _warn_about_formats(folder, left_out)
    return samples


def _images_and_others(folder: str) -> tuple[list[str], list[str]]:
    """Images below a folder in formats that relvit reads, and images of other formats, by their endings."""
    found = files_below(folder, IMAGE_ENDINGS + OTHER_ENDINGS)
    images = [path for path in found if path.lower().endswith(IMAGE_ENDINGS)]
    return images, [path for path in found if not path.lower().endswith(IMAGE_ENDINGS)]


def _matching(pattern: str) -> list[str]:
    """Images that match a pattern, and all images below folders that match it."""
    matches = sorted(glob.glob(pattern, recursive=True))
    folders = {path for path in map(Path, matches) if path.is_dir()}
    # `photos/**` also matches everything below `photos`, so leave out what lies below another matching folder.
    matches = [path for path in matches if folders.isdisjoint(Path(path).parents)]
    files = [path for path in matches if not os.path.isdir(path)]
    _warn_about_formats(pattern, [path for path in files if path.lower().endswith(OTHER_ENDINGS)])
    images = [path for path in files if path.lower().endswith(IMAGE_ENDINGS)]
    return images + [image for path in matches if os.path.isdir(path) for image in image_files(path)]


def _warn_about_formats(place: str, left_out: Sequence[str]) -> None:
    if left_out:
        text = f"{visible(place)}: {_counted(left_out)}; save them in a format that is read, such as PNG or JPEG"
        warnings.warn(text, stacklevel=3)


def _counted(left_out: Sequence[str]) -> str:
    """Count files by their endings, such as '12 files left out: 10 .psd, 2 .heic'."""
    endings = Counter(os.path.splitext(path)[1].lower() for path in left_out).most_common()
    total = f"{counted(len(left_out), 'file')} left out"
    return f"{total}: {', '.join(f'{count} {ending}' for ending, count in endings)}"


def _identity(path: str | Path) -> tuple[int, int]:
    """Return the device and the inode of a file or folder."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _raise(error: OSError) -> None:
    # Raise this error, because `os.walk` by itself silently leaves out folders that cannot be listed.
    raise error
