"""Images named by lists: a row for each, with path and label."""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from relvit.data.files.dataset import images_to_predict
from relvit.data.files.lists import Row, complain, read_list
from relvit.data.labels import check_every_class, classes_of, positions
from relvit.data.modules.base import Split
from relvit.data.modules.image_files import ImageFilesData
from relvit.utils.messages import did_you_mean


class ImageListData(ImageFilesData):
    """Images in lists with the columns `path` and `label`: CSV, TSV (.tsv) or Parquet (with ``relvit[parquet]``).

    Paths are absolute, or relative to root, or, where no root is given, to the folder of their list. Labels are names
    of classes, or numbers. Without a list for val, a part of train is put aside. Other columns are ignored. All rows
    are checked before the first image is loaded, and wrong ones named by their line.

    Args:
        train: The list to train on.
        val: The list to validate on.
        test: The list to test on.
        predict: What to predict: a list, which needs no labels, or a folder of images; None: test or else val.
        root: The folder that relative paths start from; None: that of each list.
        class_names: Name of each class, the position is the label (a checkpoint knows them); labels are then these
            names, or the positions as numbers. None takes the sorted labels of train, numbers by their value.
        options: See :class:`relvit.data.ImageFilesData`.

    Raises:
        FileNotFoundError: A list, or root, is missing.
        ValueError: An argument out of its range, neither train nor class_names, or fewer than two classes; wrong rows
            of train; those of the other lists when they are first used.
        ModuleNotFoundError: A Parquet file without pyarrow.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        root: str | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        # Absolute: a checkpoint remembers them, and may be used from elsewhere.
        self.train, self.val, self.test, self.predict, self.root = (
            None if path is None else os.path.abspath(os.path.expanduser(path))
            for path in (train, val, test, predict, root)
        )
        if self.root is not None and not os.path.isdir(self.root):
            raise FileNotFoundError(f"root {self.root} is no folder; give the one that the lists' paths start from")
        if class_names is None:
            if self.train is None:
                raise ValueError("no train list; give one (--data.train), or class_names (a checkpoint knows them)")
            class_names = classes_of(row.label for row in self._train_rows)
        super().__init__(class_names, **options)

    @property
    def place(self) -> str:
        """The list of train, or another."""
        return self.train or self.val or self.test or self.predict or "no list"

    def missing(self, split: Split) -> str | None:
        """Which list is missing, or None."""
        if split == "predict":
            if self.predict or self.test or self.val:
                return None
            return "no list to predict; give a list or a folder (--data.predict)"
        if self._came(split) or (split == "val" and self.train):
            return None
        return f"no {split} list; give one (--data.{split})"

    def _came(self, split: Split) -> bool:
        return getattr(self, split) is not None

    def _samples(self, split: Split) -> list[tuple[str, int]]:
        file = getattr(self, split)
        rows = self._train_rows if split == "train" else read_list(file)
        labels = self._labels(file, rows)
        if split == "train":
            check_every_class(labels, self.class_names, file)
        return list(zip(self._files(file, rows), labels, strict=True))

    def _paths_to_predict(self) -> list[str]:
        source = self.predict or self.test or self.val
        if os.path.isdir(source):
            return images_to_predict(source)
        return self._files(source, read_list(source, labelled=False))

    def _shown(self, path: str) -> str:
        return self._written[path]

    @cached_property
    def _train_rows(self) -> list[Row]:
        return read_list(self.train)

    @cached_property
    def _written(self) -> dict[str, str]:
        """The path as it stands in the list of train, of each file."""
        return {self._absolute(self.train, row): row.path for row in self._train_rows}

    def _absolute(self, file: str, row: Row) -> str:
        return os.path.join(self.root or os.path.dirname(file), row.path)

    def _files(self, file: str, rows: Sequence[Row]) -> list[str]:
        """The files of a list's rows. One that does not exist is a wrong row, unless unreadable files are skipped."""
        paths = [self._absolute(file, row) for row in rows]
        if self.on_error == "error":
            lines = zip((row.line for row in rows), paths, strict=True)
            complain(file, [(line, f"no file {path}") for line, path in lines if not os.path.isfile(path)])
        return paths

    def _labels(self, file: str, rows: Sequence[Row]) -> list[int]:
        """The label of each row: the position of its class."""
        known = positions([row.label for row in rows], self.class_names)
        wrong = [
            (row.line, f"unknown class {row.label!r}{did_you_mean(row.label, known)}")
            for row in rows
            if row.label not in known
        ]
        complain(file, wrong)
        return [known[row.label] for row in rows]
