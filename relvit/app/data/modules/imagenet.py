"""ImageNetData: ImageNet-1k (ILSVRC 2012) in folders by WordNet id, with readable class names."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from scipy.io import loadmat

from relvit.app.data.images.folders import class_folders
from relvit.app.data.modules.image_folder import ImageFolderData, find_splits
from relvit.app.utils.files import kept_path
from relvit.app.utils.shown_text import counted
from relvit.utils.messages import listing

META_MAT = os.path.join("ILSVRC2012_devkit_t12", "data", "meta.mat")
META_BIN = "meta.bin"


class ImageNetData(ImageFolderData):
    """ImageNet-1k (Russakovsky et al. 2015, arXiv 1409.0575) in ``root/train/<wnid>/...`` and ``root/val/<wnid>/...``.

    ``tools/prepare_imagenet.py`` makes these folders from the official archives. Labels are indices of the sorted
    WordNet ids (n01440764, ...), as in torchvision and timm. The name of a class is its first name in the devkit's
    ``meta.mat`` (``root/ILSVRC2012_devkit_t12/data``) or in torchvision's ``meta.bin`` (``root``), followed by the id
    if two classes have the same name; without these files the id is the name. The folders of some classes may be
    missing. The official test images have no public labels, so evaluate on val (`relvit test --split val`).

    Args:
        root: The folder that holds train and val.
        wnids: WordNet id of each class; the label of a class is its index in this list. A checkpoint stores these ids.
            None takes the sorted names of the folders in train; if there is no train, in val.
        class_names: Name of each class; None: the names described above.
        options: See :class:`relvit.app.data.ImageFilesData`.

    Raises:
        FileNotFoundError: root is missing, or has neither train nor val and wnids is None.
        ValueError: An argument is out of its range, there are fewer than two classes, or the name of a class folder is
            not a WordNet id.
    """

    def __init__(
        self, root: str, wnids: list[str] | None = None, class_names: list[str] | None = None, **options: Any
    ) -> None:
        place, parent = kept_path(root), None
        if wnids is None:
            folders = find_splits(place)
            if not folders:
                raise FileNotFoundError(
                    f"neither train nor val in {place}; make them with tools/prepare_imagenet.py, or give wnids "
                    "(a checkpoint knows them)"
                )
            parent = folders.get("train") or folders.get("val") or folders["test"]
            wnids = class_folders(parent)
        if others := [wnid for wnid in wnids if not re.fullmatch(r"n\d{8}", wnid)]:
            raise ValueError(
                f"{listing(others)} are not WordNet ids such as 'n01440764': use ImageFolderData for other folders"
            )
        if class_names is not None and len(class_names) != len(wnids):
            cure = f"give {len(wnids)}, one for each of wnids"
            if parent is not None:
                cure = f"{parent} has {counted(len(wnids), 'class folder')}: give wnids (--data.wnids), the WordNet id "
                cure += f"of each of the {counted(len(class_names), 'class')}, or, to train, one name for each folder"
            raise ValueError(f"class_names holds {counted(len(class_names), 'name')}; {cure}")
        self.wnids: list[str] = list(wnids)
        super().__init__(root, readable_names(place, wnids) if class_names is None else class_names, **options)
        self._classes_given = parent is None

    @property
    def _folder_classes(self) -> Sequence[str]:
        return self.wnids


def readable_names(root: str, wnids: Sequence[str]) -> list[str]:
    """Read a readable name of each class, all different; see :class:`ImageNetData`.

    Raises:
        ValueError: `meta.mat` or `meta.bin` does not know a class.
    """
    if os.path.isfile(file := os.path.join(root, META_MAT)):
        synsets = loadmat(file, squeeze_me=True)["synsets"]
        pairs = zip(synsets["WNID"], synsets["words"], strict=True)
        words = {str(wnid): str(names).split(", ") for wnid, names in pairs}
    elif os.path.isfile(file := os.path.join(root, META_BIN)):
        words = torch.load(file, weights_only=True)[0]
    else:
        return list(wnids)
    if unknown := [wnid for wnid in wnids if wnid not in words]:
        raise ValueError(f"{file} does not know {listing(unknown)}; remove these folders, or give class_names")
    first = [words[wnid][0] for wnid in wnids]
    counts = Counter(first)
    return [name if counts[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(first, wnids, strict=True)]
