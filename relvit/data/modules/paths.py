"""Data modules of commands: ImagePathsData, named images to predict, and RobustnessData, robustness sets to test on."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchvision.transforms import v2

from relvit.data.images.datasets import LabelledFiles, NamedFiles, OnError
from relvit.data.images.folders import class_folders, find_images, folders_of_classes, labelled_files
from relvit.data.labels import positions
from relvit.data.modules.base import ImageData, Split
from relvit.utils.messages import did_you_mean, listing


class ImagePathsData(ImageData):
    """Images to predict by paths, for the classes and the image size of a model.

    Args:
        paths: Files, folders with all images below them, and patterns, see `find_images`.
        mean: Mean of each channel, in units of the range 0..1; with one channel the images become grey.
        on_error: What to do about a file that cannot be read: 'skip' goes on without it, 'error' stops and names it.
        class_names, img_size, std, crop_pct, batch_size, num_workers, native, max_tokens, patch_size: See
            :class:`relvit.data.ImageData`.

    Raises:
        ValueError: An argument out of its range; later, a path at which there is no image.
    """

    # `relvit predict` builds it from the paths; it has nothing to train on.
    chosen_by_name = False

    def __init__(
        self,
        paths: Sequence[str],
        class_names: list[str],
        img_size: int | tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop_pct: float,
        batch_size: int = 64,
        num_workers: int = 2,
        on_error: OnError = "skip",
        native: bool = False,
        max_tokens: int | None = None,
        patch_size: int | tuple[int, int] = 16,
    ) -> None:
        if len(mean) not in (1, 3):
            raise ValueError(f"the model takes images of {len(mean)} channels; files are read with 1 or 3")
        sizes: dict[str, Any] = {"img_size": img_size, "crop_pct": crop_pct}
        sizes |= {"native": native, "max_tokens": max_tokens, "patch_size": patch_size}
        loading = {"batch_size": batch_size, "num_workers": num_workers}
        super().__init__(class_names, len(mean), augment="none", mean=mean, std=std, **sizes, **loading)
        self.paths = list(paths)
        self.on_error = on_error

    def missing(self, split: Split) -> str | None:
        """Explain that there are no splits with labels."""
        return None if split == "predict" else f"images without labels can only be predicted: there is no {split}"

    def build(self, split: Split) -> Dataset:
        """Build the dataset of the images to predict; looks for the files."""
        return NamedFiles(find_images(self.paths), self._file_transform)

    @property
    def _file_transform(self) -> v2.Compose:
        """The transform of evaluation, of files that are read in colour."""
        transform = self.eval_transform
        return v2.Compose([v2.Grayscale(), *transform.transforms]) if self.in_chans == 1 else transform


class RobustnessData(ImagePathsData):
    """Test images of a robustness set, some or all of whose folders are classes of a model.

    Layouts, told apart by the folders: ``root/<class>/<image>`` (ImageNet-A, -R, -V2) and
    ``root/.../<corruption>/<severity>/<class>/<image>`` (ImageNet-C), where severities are numbers. Images are right in
    the folders of classes. These folders have the names of classes, or all have WordNet ids (with `wnids`), or numbers,
    which are positions of classes (ImageNet-V2: of the sorted WordNet ids).

    Args:
        root: The folder of the set, or of a part of it.
        class_names: Name of each class of the model.
        wnids: WordNet id of each class, where they are known.
        class_map: A JSON file with an object whose keys are names of folders and whose values are names of classes.
        options: See :class:`ImagePathsData`.

    Attributes:
        conditions: Corruption and severity of each image, once the dataset is built; ``()`` in other layouts.

    Raises:
        FileNotFoundError: There is no folder at `root`, or no file at `class_map`.
        ValueError: An argument out of its range; later, a folder that is no class of the model, or without images.
    """

    def __init__(
        self,
        root: str,
        class_names: list[str],
        wnids: list[str] | None = None,
        class_map: str | None = None,
        **options: Any,
    ) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        if not os.path.isdir(self.root):
            raise FileNotFoundError(f"no folder {root}; give that of a robustness set, such as imagenet-a")
        super().__init__([self.root], class_names, **options)
        self.wnids = wnids
        self.class_map = class_map
        self.conditions: Sequence[tuple[str, int]] = ()

    def missing(self, split: Split) -> str | None:
        """Explain that there are no splits but test."""
        return None if split == "test" else f"a robustness set can only be tested on: there is no {split}"

    def build(self, split: Split) -> Dataset:
        """Build the dataset of all images; looks for the files."""
        sets = folders_of_classes(self.root)
        labels = self._labels({name for folder in sets for name in class_folders(folder)})
        samples: list[tuple[str, int]] = []
        conditions: list[tuple[str, int]] = []
        for folder in sets:
            found = labelled_files(folder, labels)
            samples += found
            place = Path(folder)
            if place.name.isdigit() and folder != self.root:
                inside = place.parent.relative_to(self.root).as_posix()
                conditions += [(place.parent.name if inside == "." else inside, int(place.name))] * len(found)
        if conditions and len(conditions) < len(samples):
            raise ValueError(f"{self.root} holds corruptions with and without folders of severities: test them apart")
        self.conditions = conditions
        return LabelledFiles(samples, self._file_transform)

    def _labels(self, folders: Iterable[str]) -> dict[str, int]:
        """Label of each class by the name of its folder."""
        if self.class_map is not None:
            try:
                named = dict(json.loads(Path(self.class_map).read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"class_map {self.class_map} is no JSON object of names: {error}") from error
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
