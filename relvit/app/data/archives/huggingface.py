"""Hugging Face reader: datasets of the hub, of local Parquet files, or from save_to_disk."""

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from relvit.app.data.archives.reader import Content, Reader
from relvit.app.data.class_labels import as_label
from relvit.app.data.images.decode import StoredImage
from relvit.app.data.images.manifest import file_size
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.shown_text import one_line
from relvit.utils.messages import did_you_mean, listing


@dataclass(frozen=True, slots=True, eq=False)
class RowImage(StoredImage):
    """The encoded image of one row. Copies in DataLoader workers share the memory-mapped files.

    Args:
        split: Name of dataset and split, for messages.
        rows: A `datasets.Dataset` with only the column of the images, each as encoded bytes or as the path of a file.
        column: The column of the images.
        index: The row.
        key: Name of the row.
    """

    split: str
    rows: Any
    column: str
    index: int
    key: str

    @property
    def shared(self) -> Any:
        return self.rows

    def read(self) -> bytes:
        """Read the encoded image from the row, or from the file on disk that the row names."""
        value = self.rows[self.index][self.column] or {"bytes": None, "path": None}
        if value["bytes"] is not None:
            return value["bytes"]
        path = value["path"]
        if path is None:
            raise ValueError("the row holds no image")
        # A downloaded dataset may contain any path, even a URL or a device, so open only regular files.
        if not os.path.isfile(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        with open(path, "rb") as stream:
            return stream.read()

    def __str__(self) -> str:
        return f"{self.split}/{self.key}"


class HuggingFace(Reader):
    """A Hugging Face dataset, loaded by `datasets.load_dataset` or from a folder that `save_to_disk` has written.

    Code that comes with a dataset is never run, and URLs of images are never opened.

    Args:
        path: The name on the hub, or the folder.
        cache: The folder for downloaded and prepared files; None: the cache of the `datasets` library.
        input_key, target_key: See :class:`relvit.app.data.ReaderData`.
    """

    def __init__(self, path: str, cache: str | None, input_key: str = "image", target_key: str = "label") -> None:
        self.path = path
        self.cache = cache
        self.input_key = input_key
        self.target_key = target_key
        # For the name of each split that is loaded, this attribute has the parts of the dataset's own splits in it.
        self._parts: dict[str, list[Any]] = {}

    def find(self, split: str, labelled: bool) -> Content:
        """Find the images of a split in the order of its rows, see :class:`Reader`."""
        datasets = _datasets()
        table = self._load(datasets, split).with_format(None)
        encoded = self._encoded(datasets, table)
        source = f"hfds/{self.path}/{split}", encoded, self.input_key
        images = [RowImage(*source, index, key) for index, key in enumerate(self._keys(encoded))]
        return Content(images, *self._labels(datasets, table)) if labelled else Content(images)

    def key(self, image: RowImage) -> str:
        """Name an image by its file, if the dataset has the file's name, or by the number of its row."""
        return image.key

    def identity(self, image: RowImage) -> str:
        """Name an image by its row in a split of the dataset, such as train, of which 'train[:10%]' is a part."""
        row = image.index
        for part in self._parts.get(image.split, ()):
            if row < part.to - part.from_:
                return f"{part.splitname}/{part.from_ + row}"
            row -= part.to - part.from_
        return str(image)

    def sizes(self, images: Sequence[RowImage]) -> Iterator[int | None]:
        """Yield the sizes from the offsets of the column of bytes, without reading it, or of the files in rows."""
        if not images:
            return
        import pyarrow.compute as compute

        table = images[0].rows.flatten().with_format("arrow")[:]
        lengths = compute.binary_length(table[f"{self.input_key}.bytes"]).to_pylist()
        paths = table[f"{self.input_key}.path"].to_pylist()
        for image in images:
            length, path = lengths[image.index], paths[image.index]
            yield file_size(path) if length is None and path is not None else length

    def _load(self, datasets: ModuleType, split: str) -> Any:
        saved = [name for name in ("dataset_dict.json", "state.json") if os.path.isfile(os.path.join(self.path, name))]
        try:
            if not saved:
                table = datasets.load_dataset(self.path, split=split, cache_dir=self.cache)
                lengths = {name: each.num_examples for name, each in (table.info.splits or {}).items()}
                self.splits: Sequence[str] = list(lengths)
                if lengths:
                    parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
                    self._parts[f"hfds/{self.path}/{split}"] = parts
                return table
            found = datasets.load_from_disk(self.path)
        except MemoryError:
            raise
        # `datasets` raises exceptions of many types for wrong files, formats, connections or kinds of data, so catch
        # all of them.
        except Exception as error:
            raise ValueError(f"cannot load the split {split!r} of hfds/{self.path}: {one_line(error)}") from error
        splits = found if isinstance(found, datasets.DatasetDict) else {str(found.split or "train"): found}
        self.splits = list(splits)
        if split not in splits:
            known = sorted(map(str, splits))
            hint = did_you_mean(split, known)
            raise ValueError(f"no split {split!r} in hfds/{self.path}{hint}; it holds {listing(known)}")
        return splits[split]

    def _encoded(self, datasets: ModuleType, table: Any) -> Any:
        """Select only the column of images, as encoded bytes or paths."""
        feature = self._feature(table, self.input_key, "input_key")
        raw = isinstance(feature, datasets.Value) and feature.dtype in ("binary", "large_binary")
        fields = isinstance(feature, dict) and {"bytes", "path"} >= feature.keys() and "bytes" in feature
        if isinstance(feature, datasets.Image) or raw or fields:
            column = table.select_columns([self.input_key])
            return column.cast_column(self.input_key, datasets.Image(decode=False))
        images = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
        raise ValueError(
            f"column {self.input_key!r} of hfds/{self.path} holds no images but {feature}; columns of images are "
            f"{listing(images) or 'none'} (--data.input_key)"
        )

    def _feature(self, table: Any, column: str, option: str) -> Any:
        if column not in table.features:
            names = sorted(table.features)
            raise ValueError(
                f"no column {column!r} in hfds/{self.path}{did_you_mean(column, names)}; its columns are "
                f"{listing(names)} (--data.{option})"
            )
        return table.features[column]

    def _keys(self, encoded: Any) -> list[str]:
        """Name each row by its file, with a count if several rows have the same name, or else by its number."""
        column = f"{self.input_key}.path"
        paths = encoded.flatten().select_columns([column]).with_format("arrow")[:][column].to_pylist()
        seen: Counter[str] = Counter()
        keys = []
        for index, path in enumerate(paths):
            name = f"row {index}" if path is None else self._file_name(path)
            seen[name] += 1
            keys.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
        return keys

    def _file_name(self, path: str) -> str:
        if path.startswith(f"{self.path}/"):
            return os.path.relpath(path, self.path)
        return os.path.basename(path) if os.path.isabs(path) else path

    def _labels(self, datasets: ModuleType, table: Any) -> tuple[list[str | None], list[str] | None]:
        """Read the label of each row, and the names of the classes if the column has names."""
        feature = self._feature(table, self.target_key, "target_key")
        column = f"column {self.target_key!r} of hfds/{self.path}"
        allowed = (
            "labels are a ClassLabel, texts or whole numbers; give such a column by --data.target_key, the columns are "
            f"{listing(sorted(table.features))}"
        )
        if not isinstance(feature, datasets.ClassLabel | datasets.Value):
            raise ValueError(f"{column} holds no classes, its type is {type(feature).__name__}: {allowed}")
        values = table.select_columns([self.target_key]).with_format("arrow")[:][self.target_key].to_pylist()
        if isinstance(feature, datasets.ClassLabel) and feature.names:
            known = dict(enumerate(feature.names))
            return [known[value] if value in known else as_label(value) for value in values], list(feature.names)
        try:
            return [as_label(value) for value in values], None
        except TypeError as error:
            raise ValueError(f"{column} holds no classes, its type is {feature.dtype}: {error}; {allowed}") from error


def _datasets() -> ModuleType:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingPackageError("a Hugging Face dataset", "datasets") from error
    # Older versions of `datasets` can run code that comes with a dataset, so refuse these versions.
    if int(datasets.__version__.split(".")[0]) < 4:
        raise ModuleNotFoundError(
            f'datasets {datasets.__version__} is too old, 4.0 or newer is needed: pip install -U "relvit[hfds]"',
            name="datasets",
        )
    return datasets
