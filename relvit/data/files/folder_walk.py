"""Folders as people have them: with links in circles, stray images, and classes whose names are nearly the same."""

import os
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence

from relvit.utils.messages import listing, printable


def walk_once(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder at or below `folder`, and the names of the files right in it; hidden ones are left out.

    Links to folders are followed, but no folder comes twice, and none that holds `folder` comes at all: links may lead
    in circles, and a class must not take in the others through a link to their parent. A folder that is there itself
    and by a link comes as itself. What is no folder gives nothing.

    Raises:
        OSError: a folder cannot be listed.
    """
    if not os.path.isdir(folder):
        return
    seen = {_identity(place) for place in _parents(os.path.realpath(folder))}
    waiting = [folder]
    while waiting:
        links: list[str] = []
        for start in waiting:
            for parent, folders, names in os.walk(start, onerror=_give_up):
                if (identity := _identity(parent)) in seen:
                    folders.clear()
                    continue
                seen.add(identity)
                # .ipynb_checkpoints holds copies, and macOS puts ._name.jpg next to name.jpg, which is no image
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                paths = (os.path.join(parent, name) for name in folders)
                links += [path for path in paths if os.path.islink(path)]
                yield parent, [name for name in names if not name.startswith(".")]
        waiting = sorted(links)


def warn_about_classes(folder: str, names: Sequence[str], images: int) -> None:
    """Warn of class folders that some file systems take for one, and of so many images that belong to no class."""
    alike = defaultdict(list)
    for name in names:
        alike[unicodedata.normalize("NFC", name).casefold()].append(printable(name))
    if groups := [group for group in alike.values() if len(group) > 1]:
        warnings.warn(
            f"{printable(folder)} has the classes {' and '.join(listing(group) for group in groups)}, which differ in "
            "case or accents alone; where file systems do not tell them apart they become one: rename them",
            stacklevel=2,
        )
    if images:
        warnings.warn(
            f"{images} {'image is' if images == 1 else 'images are'} beside the class folders of {printable(folder)} "
            "and will not be used as one of a class: move them into class folders, or away",
            stacklevel=2,
        )


def _parents(place: str) -> Iterator[str]:
    while (parent := os.path.dirname(place)) != place:
        yield parent
        place = parent


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _give_up(error: OSError) -> None:
    # `os.walk` by itself would leave out what it cannot list.
    raise error
