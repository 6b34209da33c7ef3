"""ReaderData: Hugging Face datasets, WebDataset shards and tar archives, named as for timm; missing labels."""

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relvit.app.data.archives.huggingface import HuggingFace
from relvit.app.data.archives.reader import Content, Reader
from relvit.app.data.archives.tar import TarFolders, images_in, none_in
from relvit.app.data.archives.webdataset import IMAGE_PARTS, Shards, refuse_remote
from relvit.app.data.class_labels import check_every_class, check_printable, classes_of, positions
from relvit.app.data.images.decode import ImageSource, StoredImage
from relvit.app.data.images.folders import images_to_predict
from relvit.app.data.modules.base import Split
from relvit.app.data.modules.image_files import ImageFilesData
from relvit.app.utils.files import kept_path
from relvit.app.utils.shown_text import counted, visible
from relvit.utils.messages import did_you_mean, listing

_KNOWN = "a name is hfds/NAME, wds/NAME, or the path of a tar archive or of a folder with archives"
# timm has readers for these prefixes, too, but relvit does not support them: names that begin with them are refused.
_OTHERS = ("tfds", "hfids", "torch")


class ReaderData(ImageFilesData):
    """Images in Hugging Face datasets, WebDataset shards or tar archives, named as for `timm.data.create_dataset`.

    ``hfds/NAME`` is a dataset of the Hugging Face hub, or a local folder (``hfds//path``) of Parquet files, of images
    or from `save_to_disk`; it needs ``relvit[hfds]``. ``wds/NAME`` are WebDataset shards in root. Any other name is a
    tar archive with class folders, or a folder of such archives. Shards and archives have to be on disk and not
    compressed, because images are read from them directly. A label is the name or the number of a class, see
    `class_names`; images whose label is missing, empty or a negative number are left out with a warning.

    Args:
        name: The data, see above.
        root: ``wds``: the folder of the shards (None: NAME is this folder). Archives: the folder from which the path in
            `name` starts. ``hfds``: the folder for downloads.
        train_split: The split to train on. ``hfds``: a split or a part of it, such as ``'train[:90%]'``. ``wds``: a
            split in ``_info.json``, or shards, such as ``'name-{0000..0127}.tar'``. Archives: a folder in an archive,
            or an archive; if the data have no splits, 'train' means everything.
        val_split: The split to validate on; None: a part of train is held out.
        test_split: The split to test on, if there is one.
        predict: What to predict: a folder of images, or a tar archive; None: test without its labels, or val if there
            is no test.
        input_key: ``hfds``: the column of the images, by default 'image'. ``wds``: the endings of image files, by
            default 'jpg;jpeg;png;webp'.
        target_key: ``hfds``: the column of the labels, by default 'label'. ``wds``: the field of the sample's .json
            file that is the label; by default the label is the .cls file.
        class_names: Name of each class; the label of a class is its index in this list. A checkpoint stores these
            names. Labels in the data are then these names or their indices. None takes the names that the dataset
            declares, or else the different labels of train, sorted; numbers are sorted by their value.
        options: See :class:`relvit.app.data.ImageFilesData`.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: An argument is out of its range; `name` is not of these kinds, or is a URL; or there are fewer than
            two classes.
        ValueError: `name` of shards and `root` are two folders, or `input_key` or `target_key` is given for tar
            archives.
        ValueError: A file is broken, or a label is not a class. Splits are read when they are first used; train is read
            at once if `class_names` is None.
        ModuleNotFoundError: `name` begins with ``hfds/``, and the package datasets is not installed.
    """

    name: str
    root: str | None

    def __init__(
        self,
        name: str = "",
        root: str | None = None,
        train_split: str = "train",
        val_split: str | None = None,
        test_split: str | None = None,
        predict: str | None = None,
        input_key: str | None = None,
        target_key: str | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        self.name, self.root = _located(os.fspath(name), root)
        self.predict: str | None = None if predict is None else _absolute(predict)
        self.train_split = train_split
        self.val_split = val_split
        self.test_split = test_split
        self.input_key = input_key
        self.target_key = target_key
        self._reader = _reader(self.name, self.root, input_key, target_key)
        self._found: dict[tuple[str, bool], Content] = {}
        if class_names is None:
            content = self._find(train_split, labelled=True)
            labels = (label for label in content.labels if label is not None)
            class_names = classes_of(labels) if content.declared is None else content.declared
            check_printable(class_names, self.place)
        super().__init__(class_names, **options)

    @property
    def place(self) -> str:
        """Name of the dataset, or path of the folder or archive."""
        return self.name if _kind(self.name)[0] == "hfds" else str(self.root)

    def missing(self, split: Split) -> str | None:
        """Explain which split is not named, or return None."""
        if split == "predict":
            if self.predict or self.test_split or self.val_split:
                return None
            return "nothing to predict; give a folder of images (--data.predict), or a split (--data.test_split)"
        return None if self._has_own(split) or split == "val" else f"no {split} split; name one (--data.{split}_split)"

    def _has_own(self, split: Split) -> bool:
        return getattr(self, f"{split}_split") is not None

    def _find(self, name: str, labelled: bool) -> Content:
        """Find the images of a split, once."""
        if (name, labelled) not in self._found:
            content = self._reader.find(name, labelled)
            if not content.images:
                raise ValueError(f"the split {name!r} of {self.place} has no images: give another split")
            if labelled and all(label is None for label in content.labels):
                raise ValueError(
                    f"no image of the split {name!r} of {self.place} has a label: use this split for predictions alone"
                )
            self._found[name, labelled] = content
        return self._found[name, labelled]

    def _samples(self, split: Split) -> list[tuple[ImageSource, int]]:
        name = getattr(self, f"{split}_split")
        content = self._find(name, labelled=True)
        pairs = list(zip(content.images, content.labels, strict=True))
        labelled = [pair for pair in pairs if pair[1] is not None]
        if without := [image for image, label in pairs if label is None]:
            warnings.warn(
                f"the split {name!r} of {self.place} has no label for {len(without)} of "
                f"{counted(len(pairs), 'image')}, such as {visible(str(without[0]))}: left out",
                stacklevel=2,
            )
        known = positions((label for _, label in labelled), self.class_names)
        wrong = [(image, label) for image, label in labelled if label not in known]
        if wrong:
            image, label = wrong[0]
            hint = did_you_mean(label, known)
            raise ValueError(
                f"the split {name!r} of {self.place} has {counted(len(wrong), 'image')} of an unknown class, such as "
                f"{visible(str(image))}: {label!r}{hint}; known are {listing(list(known))}"
            )
        samples = [(image, known[label]) for image, label in labelled]
        if split == "train" and content.declared is None:
            check_every_class((label for _, label in samples), self.class_names, self.place)
        return samples

    def _doubts(self, counts: Mapping[str, int]) -> list[str]:
        # The user may give a split as a path, an archive or a part ('photos/val', 'val.tar', 'test[:50%]'), so compare
        # the words.
        given = (self.train_split, self.val_split, self.test_split)
        used = {word for name in given if name for word in re.split(r"[/.+\[]", name)}
        return super()._doubts(counts) + [
            f"the split {name!r} of {self.place} is not used: if it holds {split}, give --data.{split}_split {name}"
            for split, name in self._unused(set(self._reader.splits) - used).items()
        ]

    def _paths_to_predict(self) -> list[ImageSource]:
        if self.predict is None:
            return list(self._find(self.test_split or self.val_split, labelled=False).images)
        if not os.path.isfile(self.predict):
            return images_to_predict(self.predict)
        images = images_in(self.predict)
        if not images:
            raise ValueError(none_in(self.predict, [self.predict]))
        return sorted(images, key=str)

    def _display_name(self, path: StoredImage) -> str:
        return self._reader.key(path)

    def _name_in_split(self, path: StoredImage, split: Split) -> str:
        return self._reader.key(path)

    def _place_of(self, path: StoredImage) -> str:
        return self._reader.identity(path)

    def _sizes(self, images: Sequence[StoredImage]) -> Iterable[int | None]:
        return self._reader.sizes(images)


def _located(name: str, root: str | None) -> tuple[str, str | None]:
    """Make paths absolute, and move folders of shards and archives from name to root, for use with another root."""
    kind, rest = _kind(name)
    if not rest and (kind == "hfds" or root is None):
        raise ValueError(f"name is {name!r}; {_KNOWN}")
    if kind == "hfds":
        local = os.path.exists(os.path.expanduser(rest))
        return f"hfds/{_absolute(rest) if local else rest}", None if root is None else _absolute(root)
    refuse_remote(rest)
    if kind == "wds":
        place = _absolute(rest if root is None else root)
        if os.path.isdir(rest) and _absolute(rest) != place:
            raise ValueError(f"name is {name!r} and root {place}, which are two folders; give root alone")
        return "wds/" if root is None else f"wds/{rest}", place
    return "", _absolute(os.path.join(root or "", os.path.expanduser(rest)))


def _reader(name: str, root: str | None, input_key: str | None, target_key: str | None) -> Reader:
    kind, rest = _kind(name)
    if kind == "hfds":
        return HuggingFace(rest, root, input_key or "image", target_key or "label")
    if kind == "wds":
        return Shards(root, input_key or IMAGE_PARTS, target_key)
    given = {"input_key": input_key, "target_key": target_key}
    if useless := [key for key, value in given.items() if value is not None]:
        raise ValueError(f"{useless[0]} has no meaning for class folders in tar archives; drop it, or {_KNOWN}")
    return TarFolders(root)


def _kind(name: str) -> tuple[str, str]:
    """Split a name into 'hfds' or 'wds' and the rest; '' and the name for archives."""
    prefix, slash, rest = name.partition("/")
    if slash and prefix.lower() in ("hfds", "wds"):
        return prefix.lower(), rest
    if slash and prefix.lower() in _OTHERS:
        raise ValueError(f"name is {name!r}; data of the kind {prefix!r} are not read: {_KNOWN}")
    return "", name


def _absolute(path: str) -> str:
    refuse_remote(path)
    return kept_path(path)
