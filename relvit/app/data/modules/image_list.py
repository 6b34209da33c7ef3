"""ImageListData: images named in CSV, TSV or Parquet lists, a row with path and label for each."""

import codecs
import csv
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from numbers import Number
from typing import Any, Literal, NamedTuple

from relvit.app.data.class_labels import Label, check_every_class, check_printable, classes_in, classes_of, positions
from relvit.app.data.images.folders import images_to_predict
from relvit.app.data.modules.base import Split
from relvit.app.data.modules.image_files import ImageFilesData
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.files import canonical_paths, kept_path
from relvit.app.utils.shown_text import counted, one_line, visible
from relvit.utils.messages import did_you_mean, listing

_SEPARATORS = ";,|"  # Lists usually separate several labels of an image by one of these characters.
_RECODE = "; the list is not in UTF-8: save it as CSV in UTF-8"
_SHOWN = 5  # A message names at most this number of wrong rows.


class Row(NamedTuple):
    """Path and label of an image in a list, and the line of its row for messages."""

    line: int
    path: str
    label: str


class ImageListData(ImageFilesData):
    """Images in lists with the columns `path` and `label`: CSV, TSV (.tsv) or Parquet (with ``relvit[parquet]``).

    A relative path starts from `root`, or, if `root` is None, from the folder of the list. A label is the name or the
    number of a class, see `class_names`. Further columns are ignored. All rows of a list are checked before its first
    image is loaded, and errors name the line of a wrong row. Without a list for val, a part of train is held out.

    With `label_separator` an image may have several labels, or none (multi-label classification).

    Args:
        train: The list to train on.
        val: The list to validate on.
        test: The list to test on.
        predict: What to predict: a list, which needs no labels, or a folder of images; None: test, or val if there is
            no test.
        root: The folder that relative paths start from; None: the folder of each list.
        class_names: Name of each class; the label of a class is its index in this list. A checkpoint stores these
            names. Labels in the lists are then these names or their indices. None takes the different labels of train,
            sorted; numbers are sorted by their value.
        label_separator: The character between the labels of an image, such as ';'; an empty cell means no label, and
            the labels of items are bool (num_classes,). None: one label per image.
        options: See :class:`relvit.app.data.ImageFilesData`.

    Raises:
        FileNotFoundError: A list, or root, is missing.
        ValueError: An argument is out of its range, both train and class_names are missing, or there are fewer than two
            classes.
        ValueError: A row is wrong (see `read_list`), or its label is not a class. Lists are read when they are first
            used; train is read at once if `class_names` is None.
        ModuleNotFoundError: A list is a Parquet file, and pyarrow is not installed.
    """

    train: str | None
    val: str | None
    test: str | None
    predict: str | None
    root: str | None

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        root: str | None = None,
        class_names: list[str] | None = None,
        label_separator: str | None = None,
        **options: Any,
    ) -> None:
        if label_separator == "":
            raise ValueError("label_separator is empty; give the text between the labels, such as ';'")
        self.label_separator = label_separator
        self.multi_label: bool = label_separator is not None
        self.train, self.val, self.test, self.predict, self.root = (
            None if path is None else kept_path(path) for path in (train, val, test, predict, root)
        )
        if self.root is not None and not os.path.isdir(self.root):
            raise FileNotFoundError(f"root {self.root} is not a folder; give the one that the lists' paths start from")
        if class_names is None:
            if self.train is None:
                raise ValueError("no train list; give one (--data.train), or class_names (a checkpoint knows them)")
            class_names = classes_of(name for row in self._train_rows for name in self._names(row))
            check_printable(class_names, self.train)
        super().__init__(class_names, **options)
        if label_separator is not None and self.balance != "none":
            raise ValueError(
                f"balance {self.balance!r} is for images of one label each: leave out balance or label_separator "
                "(class_weights of the model also weigh images with several labels)"
            )

    @property
    def place(self) -> str:
        """The list of train or, if there is none, another list."""
        return self.train or self.val or self.test or self.predict or "no list"

    def missing(self, split: Split) -> str | None:
        """Explain which list is missing, or return None."""
        if split == "predict":
            if self.predict or self.test or self.val:
                return None
            return "no list to predict; give a list or a folder (--data.predict)"
        if self._has_own(split) or (split == "val" and self.train):
            return None
        return f"no {split} list; give one (--data.{split})"

    def _has_own(self, split: Split) -> bool:
        return getattr(self, split) is not None

    def _samples(self, split: Split) -> list[tuple[str, Label]]:
        file = getattr(self, split)
        rows = self._train_rows if split == "train" else self._read(file)
        labels = self._labels(file, rows)
        if split == "train":
            check_every_class(chain.from_iterable(map(classes_in, labels)), self.class_names, file)
        return list(zip(self._files(file, rows), labels, strict=True))

    def _paths_to_predict(self) -> list[str]:
        source = self.predict or self.test or self.val
        if os.path.isdir(source):
            return images_to_predict(source)
        return self._files(source, read_list(source, "none", self.root))

    def _display_name(self, path: str) -> str:
        return self._written[path]

    def _name_in_split(self, path: str, split: Split) -> str:
        file = getattr(self, split) or self.train
        return path.removeprefix(os.path.join(_joined(file, "", self.root), ""))

    def _doubts(self, counts: Mapping[str, int]) -> list[str]:
        hint = "with --data.class_names a label that is not among these is an error with its line"
        doubts = [f"{self.train}: {doubt} ({hint})" for doubt in super()._doubts(counts)]
        given = self.label_separator
        one_each = given is None or not any(given in row.label for row in self._train_rows)
        for separator in _SEPARATORS if one_each else ():
            if names := [name for name in counts if separator in name]:
                doubts.append(
                    f"{listing(names, 3)} {'are one class each' if len(names) > 1 else 'is one class'}: for several "
                    f"labels per image give --data.label_separator '{separator}'"
                )
        return doubts

    @cached_property
    def _train_rows(self) -> list[Row]:
        return self._read(self.train)

    @cached_property
    def _written(self) -> dict[str, str]:
        """Map each file of train to its path in the list."""
        return {self._absolute(self.train, row): row.path for row in self._train_rows}

    def _absolute(self, file: str, row: Row) -> str:
        return _joined(file, row.path, self.root)

    def _files(self, file: str, rows: Sequence[Row]) -> list[str]:
        """Paths of a list's rows. A file that does not exist is a wrong row, unless unreadable files are skipped."""
        paths = [self._absolute(file, row) for row in rows]
        if self.on_error == "error":
            pairs = zip(rows, paths, strict=True)
            missing = [(row, path) for row, path in pairs if not os.path.isfile(path)]
            cure = ""
            if any(os.path.isfile(_joined(file, _as_latin_1(row.path), self.root)) for row, _ in missing):
                cure = _RECODE
            elif len(missing) == len(rows) and not all(os.path.isabs(row.path) for row in rows):
                cure = f"; paths start from {_joined(file, '', self.root) or '.'}: give another folder (--data.root)"
            _refuse_rows(file, [(row.line, f"no file {path}") for row, path in missing], cure)
        return paths

    def _read(self, file: str) -> list[Row]:
        return read_list(file, "needed" if self.label_separator is None else "optional", self.root)

    def _names(self, row: Row) -> list[str]:
        """Names, or numbers, of the classes of a row."""
        if self.label_separator is None:
            return [row.label]
        return [name for name in map(str.strip, row.label.split(self.label_separator)) if name]

    def _labels(self, file: str, rows: Sequence[Row]) -> list[Label]:
        """Label of each row: the index of its class, or, for multi-label images, the indices of its classes."""
        names = [self._names(row) for row in rows]
        known = positions(list(chain.from_iterable(names)), self.class_names)
        wrong = []
        for row, of_row in zip(rows, names, strict=True):
            if unknown := [name for name in of_row if name not in known]:
                # Search near names only for rows that the message shows, because the search among many classes is slow.
                near = [did_you_mean(name, known) if len(wrong) < _SHOWN else "" for name in unknown]
                listed = ", ".join(f"{name!r}{hint}" for name, hint in zip(unknown, near, strict=True))
                wrong.append((row.line, f"unknown {'class' if len(unknown) == 1 else 'classes'} {listed}"))
        latin = any(_as_latin_1(name) in known for of_row in names for name in of_row if name not in known)
        if wrong:
            _refuse_rows(file, wrong, _RECODE if latin else _separator_hint(set(chain.from_iterable(names)), known))
        if self.label_separator is None:
            return [known[name] for (name,) in names]
        return [tuple(sorted({known[name] for name in of_row})) for of_row in names]


def read_list(
    file: str, labels: Literal["needed", "optional", "none"] = "needed", root: str | None = None
) -> list[Row]:
    """Read the rows of a list with the columns `path` and `label`; ignore further columns.

    Messages count lines as an editor does, with the header as line 1; for Parquet files, messages count rows from 1.

    Args:
        file: A name in .csv (commas), .tsv (tabs) or .parquet (needs pyarrow).
        labels: 'needed': every row needs a label; 'optional': a label may be empty; 'none': the column `label` is not
            read, and all labels are ''.
        root: The folder that relative paths start from; None: the folder of the list.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: `file` has another ending than these three, is in UTF-16 or UTF-32, or breaks the rules of CSV.
        ValueError: A column `path` or `label` is missing (`label` only if labels are read), or occurs twice.
        ValueError: There are no rows; or a row has no path, no label that is needed, or more cells than there are
            columns.
        ValueError: Two rows are for the same image, even if its path is written differently.
        ModuleNotFoundError: `file` is a Parquet file, and pyarrow is not installed.
    """
    if not os.path.isfile(file):
        found = f"{file} is a folder" if os.path.isdir(file) else f"no list at {file}"
        raise FileNotFoundError(f"{found}; give a CSV, TSV or Parquet file with the columns path and label")
    wanted = ["path"] if labels == "none" else ["path", "label"]
    match os.path.splitext(file)[1].lower():
        case ".csv":
            records = _from_text(file, wanted, ",")
        case ".tsv":
            records = _from_text(file, wanted, "\t")
        case ".parquet":
            records = _from_parquet(file, wanted)
        case other:
            raise ValueError(f"{file} ends in {other!r}; lists end in '.csv', '.tsv' or '.parquet'")
    rows, wrong = [], []
    for line, values, fault in records:
        path, label = (*values, "") if len(values) == 1 else values
        if fault:
            wrong.append((line, fault))
        elif not path:
            wrong.append((line, "no path"))
        elif labels == "needed" and not label:
            wrong.append((line, f"no label for {path}"))
        else:
            rows.append(Row(line, path, label))
    empty = any(text.startswith("no label for") for _, text in wrong)
    wrong += _repeated(rows, [_joined(file, row.path, root) for row in rows])
    cure = "; only lists of several labels per image, which --data.label_separator reads, may have empty labels"
    _refuse_rows(file, wrong, cure if empty else "")
    if not rows:
        raise ValueError(f"{file} lists no image: add a row for each")
    return rows


def _joined(file: str, path: str, root: str | None) -> str:
    """Return the path of an image in a list, which starts from root or else from the list's folder."""
    return os.path.join(root or os.path.dirname(file), path)


def _repeated(rows: Sequence[Row], paths: Sequence[str]) -> list[tuple[int, str]]:
    """Find the rows whose image is in an earlier row already, under the same path or under another spelling of it."""
    found, first = [], {}
    for row, place in zip(rows, canonical_paths(paths), strict=True):
        if (before := first.setdefault(place, row)) is not row:
            spelling = "" if before.path == row.path else f", as {before.path}"
            found.append((row.line, f"{row.path} is already in line {before.line}{spelling}"))
    return found


def _as_latin_1(text: str) -> str:
    """Decode the bytes that are not UTF-8, and so were read as surrogates, as Latin-1."""
    return re.sub("[\udc80-\udcff]", lambda letter: chr(ord(letter[0]) - 0xDC00), text)


def _separator_hint(labels: Set[str], known: Mapping[str, int]) -> str:
    """Return a hint for an error about unknown labels if a separator in one of them joins known classes, or else ''."""
    for separator in _SEPARATORS:
        for label in labels - known.keys():
            parts = list(filter(None, map(str.strip, label.split(separator))))
            if len(parts) > 1 and all(part in known for part in parts):
                return f"; for several labels per image give --data.label_separator '{separator}'"
    return ""


def _refuse_rows(file: str, wrong: Sequence[tuple[int, str]], cure: str = "") -> None:
    """Raise a ValueError that names the first wrong rows of a list, if there are any."""
    if not wrong:
        return
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    shown = "; ".join(f"line {line}: {visible(text)}" for line, text in sorted(wrong)[:_SHOWN])
    raise ValueError(f"{file} has {counted(len(wrong), 'wrong row')}: {shown}{more}{cure}")


def _check_columns(file: str, columns: Sequence[str], wanted: Sequence[str]) -> None:
    if absent := [name for name in wanted if name not in columns]:
        hint = did_you_mean(absent[0], columns).replace("did you mean", "rename")
        if len(columns) == 1 and (found := [mark for mark in ";,\t" if mark in columns[0]]):
            hint = f" (its cells are separated by {found[0]!r}: a .csv file needs commas, a .tsv file tabs)"
        raise ValueError(
            f"{file} has no column {absent[0]!r}{hint}; its columns, named in the first line, are {listing(columns)}"
        )
    if repeated := [name for name in wanted if columns.count(name) > 1]:
        count = f"{columns.count(repeated[0])} columns {repeated[0]!r}"
        raise ValueError(f"{file} has {count}: keep one; its columns are {listing(columns)}")


def _from_text(file: str, wanted: list[str], delimiter: str) -> Iterator[tuple[int, list[str], str]]:
    with open(file, "rb") as content:
        start = content.read(4096)
    # Text in UTF-16 or UTF-32 begins with a byte order mark, or has zero bytes beside each ASCII letter.
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
        raise ValueError(f"{file} is not in UTF-8, but in UTF-16 or another encoding: save it as CSV in UTF-8")
    # Spreadsheets write a byte order mark before the first column's name, which 'utf-8-sig' removes. File names need
    # not be UTF-8, so 'surrogateescape' keeps their bytes.
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
        # Without `strict`, a quote that is not closed would silently make one cell of all rows after it. But `strict`
        # refuses spaces after a closing quote, as in aligned columns, so remove these spaces. Two quotes within a cell
        # stand for one quote, which closes nothing.
        quoted = re.compile(rf'((?:^|{delimiter}) *"(?:[^"]|"")*") *(?=[{delimiter}\r\n]|$)')
        lines = (quoted.sub(r"\1", line) for line in stream)
        reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
        try:
            reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            _check_columns(file, reader.fieldnames, wanted)
            for record in reader:
                fault = _surplus(reader.fieldnames, record, delimiter)
                yield reader.line_num, [(record[name] or "").strip() for name in wanted], fault
        except csv.Error as error:
            # `DictReader.line_num` is the line of the last complete row, so take the line at which the inner reader
            # gave up. If the closing quote of a field is missing, this line may be far below the field.
            raise ValueError(
                f"{file} is broken at line {reader.reader.line_num} ({error}): look there and above for a quote that "
                'is not closed, or, within quotes, not doubled ("")'
            ) from error


def _surplus(columns: Sequence[str], record: Mapping[str | None, Any], delimiter: str) -> str:
    """Describe the cells of a row beyond the columns, which a delimiter without quotes makes; '' if there are none."""
    surplus = record.get(None, [])
    if not any(cell.strip() for cell in surplus):
        return ""
    cells = [*(record[name] for name in dict.fromkeys(columns)), *surplus]
    mark = {",": "a comma", "\t": "a tab"}[delimiter]
    counts = f"{len(columns) + len(surplus)} cells ({listing(cells, 5)}) for {counted(len(columns), 'column')}"
    advice = f'write a cell that holds {mark} in quotes, such as "one{delimiter}two"'
    return f"{counts} ({listing(columns, 5)}): {advice}"


def _from_parquet(file: str, wanted: list[str]) -> Iterator[tuple[int, list[str], str]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"the Parquet file {file}", "pyarrow") from error
    try:
        _check_columns(file, parquet.read_schema(file).names, wanted)
        table = parquet.read_table(file, columns=wanted)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {file} as a Parquet file: {one_line(error)}; write it anew") from error
    columns = [table.column(name).to_pylist() for name in wanted]
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        # Take NaN as an empty cell, because tables of pandas have NaN for missing numbers. Only NaN differs from
        # itself.
        cells = ["" if value is None or value != value else value for value in values]
        # Refuse lists, bytes and other values, which would become names of classes such as "['cat', 'dog']".
        fault = ""
        if others := [reprlib.repr(cell) for cell in cells if not isinstance(cell, str | Number)]:
            fault = f"{others[0]} is neither text nor a number: write it as text, several labels as 'cat;dog'"
        yield number, list(map(str, cells)), fault
