"""Lists of images, as CSV, TSV or Parquet, read with a complaint about every row that is wrong."""

import csv
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from relvit.utils.messages import MissingPackageError, did_you_mean, listing

_SHOWN = 5  # wrong rows that a message names


class Row(NamedTuple):
    """One image of a list: where the row is, for messages, and what it holds."""

    line: int
    path: str
    label: str


def read_list(file: str, labelled: bool = True) -> list[Row]:
    """The rows of a list with the columns `path` and `label`; further columns are ignored.

    Lines are counted as in an editor, the header being line 1; rows of Parquet from 1.

    Args:
        file: A name in .csv (commas), .tsv (tabs) or .parquet (needs pyarrow).
        labelled: Whether the column `label` is needed; otherwise labels are ''.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Another kind of file, broken text, a missing column, no rows, a row without path or label, or a path
            twice.
        ModuleNotFoundError: A Parquet file, and pyarrow is not installed.
    """
    if not os.path.isfile(file):
        raise FileNotFoundError(f"no list at {file}; give a CSV, TSV or Parquet file with the columns path and label")
    wanted = ["path", "label"] if labelled else ["path"]
    match os.path.splitext(file)[1].lower():
        case ".csv":
            records = _from_text(file, wanted, ",")
        case ".tsv":
            records = _from_text(file, wanted, "\t")
        case ".parquet":
            records = _from_parquet(file, wanted)
        case other:
            raise ValueError(f"{file} is a list of the kind {other!r}; allowed are '.csv', '.tsv' and '.parquet'")
    rows, wrong, first = [], [], {}
    for line, values in records:
        path, label = (*values, "") if len(values) == 1 else values
        if not path:
            wrong.append((line, "no path"))
        elif labelled and not label:
            wrong.append((line, f"no label for {path}"))
        elif path in first:
            wrong.append((line, f"{path} is already in line {first[path]}"))
        else:
            first[path] = line
            rows.append(Row(line, path, label))
    complain(file, wrong)
    if not rows:
        raise ValueError(f"{file} lists no image")
    return rows


def complain(file: str, wrong: Sequence[tuple[int, str]]) -> None:
    """Raise a ValueError that names the first wrong rows of a list, if there are any."""
    if not wrong:
        return
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    shown = "; ".join(f"line {line}: {text}" for line, text in wrong[:_SHOWN])
    raise ValueError(f"{file} has {len(wrong)} wrong {'row' if len(wrong) == 1 else 'rows'}: {shown}{more}")


def _check_columns(file: str, columns: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in columns:
            hint = did_you_mean(name, columns).replace("did you mean", "rename")
            raise ValueError(f"{file} has no column {name!r}{hint}; its columns are {listing(list(columns))}")


def _from_text(file: str, wanted: list[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    # -sig: spreadsheets write a mark before the first column's name
    # file names need not be UTF-8
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
        reader = csv.DictReader(stream, delimiter=delimiter)
        try:
            _check_columns(file, [name.strip() for name in reader.fieldnames or []], wanted)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            for record in reader:
                yield reader.line_num, [(record[name] or "").strip() for name in wanted]
        except csv.Error as error:
            # The line that was read last, which is where a field that has no end was given up.
            raise ValueError(f"{file} is broken at line {reader.reader.line_num}: {error}") from error


def _from_parquet(file: str, wanted: list[str]) -> Iterator[tuple[int, list[str]]]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"the Parquet file {file}", "pyarrow") from error
    _check_columns(file, parquet.read_schema(file).names, wanted)
    table = parquet.read_table(file, columns=wanted)
    columns = [table.column(name).to_pylist() for name in wanted]
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield number, ["" if value is None else str(value) for value in values]
