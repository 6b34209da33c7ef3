"""RobustnessData: robustness sets to test on, such as ImageNet-C, -A, -R and -V2, by the layout of their folders."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from relvit.app.data.class_labels import positions
from relvit.app.data.images.file_datasets import LabelledFiles
from relvit.app.data.images.folders import class_folders, folders_of_classes, labelled_files
from relvit.app.data.modules.base import Split
from relvit.app.data.modules.paths import ImagePathsData
from relvit.app.utils.files import kept_path, parse_json
from relvit.utils.messages import did_you_mean, listing


class RobustnessData(ImagePathsData):
    """Test images of a robustness set, such as ImageNet-A or ImageNet-C, in folders that are classes of a model.

    There are two layouts, recognised by the folders: ``root/<class>/<image>`` (ImageNet-A, -R, -V2) and
    ``root/.../<corruption>/<severity>/<class>/<image>`` (ImageNet-C), where severities are numbers. The folder of a
    class directly contains its images. The folder's name is the name of the class, the WordNet id of the class (with
    `wnids`), or the label of the class (in ImageNet-V2 the index of the class in the sorted WordNet ids).

    Args:
        root: The folder of the set, or of a part of the set.
        class_names: Name of each class of the model.
        wnids: WordNet id of each class, if known.
        class_map: A JSON file with an object whose keys are names of folders and whose values are names of classes.
        options: See :class:`ImagePathsData`.

    Attributes:
        conditions: Corruption and severity of each image, if the set has ImageNet-C's layout and the dataset has been
            built; otherwise ``()``.

    Raises:
        FileNotFoundError: There is no folder at `root`, or no file at `class_map`.
        ValueError: An argument is out of its range; or, when the images are first used, a folder is not a class of the
            model, or has no images, or the folders have neither layout.
    """

    def __init__(
        self,
        root: str,
        class_names: list[str],
        wnids: list[str] | None = None,
        class_map: str | None = None,
        **options: Any,
    ) -> None:
        self.root: str = kept_path(root)
        if not os.path.isdir(self.root):
            raise FileNotFoundError(f"no folder {root}; give the folder of a robustness set, such as imagenet-a")
        super().__init__([self.root], class_names, **options)
        self.wnids = wnids
        self.class_map = class_map
        self.conditions: Sequence[tuple[str, int]] = ()

    def missing(self, split: Split) -> str | None:
        """Explain that there are no splits but test."""
        return None if split == "test" else f"a robustness set can only be tested on: there is no {split}"

    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of all images; looks for the files."""
        sets = folders_of_classes(self.root)
        # Folders not named as severities may be splits, such as train and test, whose images must not be mixed.
        if others := [folder for folder in sets if folder != self.root and not Path(folder).name.isdigit()]:
            raise ValueError(
                f"{others[0]} holds class folders, but its name is not a severity (a number): give a folder that "
                f"holds CLASS/IMAGE, such as {others[0]}, or CORRUPTION/SEVERITY/CLASS/IMAGE"
            )
        labels = self._labels({name for folder in sets for name in class_folders(folder)})
        samples: list[tuple[str, int]] = []
        conditions: list[tuple[str, int]] = []
        for folder in sets:
            found = labelled_files(folder, labels)
            samples += found
            place = Path(folder)
            if folder != self.root:
                inside = place.parent.relative_to(self.root).as_posix()
                conditions += [(place.parent.name if inside == "." else inside, int(place.name))] * len(found)
        self.conditions = conditions
        return LabelledFiles(samples, self.file_transform, self.num_classes)

    def _labels(self, folders: Iterable[str]) -> dict[str, int]:
        """Label of each class by the name of its folder."""
        if self.class_map is not None:
            try:
                named = dict(parse_json(Path(self.class_map).read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"class_map {self.class_map} is not a JSON object of names: {error}") from error
            known = {name: label for label, name in enumerate(self.class_names)}
            for folder, name in named.items():
                if not isinstance(name, str) or name not in known:
                    raise ValueError(
                        f"{self.class_map}: {folder!r} is of the class {name!r}, which the model does not "
                        f"have{did_you_mean(str(name), known)}; known are {listing(self.class_names)}"
                    )
            return {folder: known[name] for folder, name in named.items()}
        if self.wnids is not None and not set(folders).isdisjoint(self.wnids):
            return {wnid: label for label, wnid in enumerate(self.wnids)}
        return positions(folders, self.class_names)
