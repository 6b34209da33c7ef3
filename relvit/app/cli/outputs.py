"""The output of commands that compute rows of figures: a table, a CSV or JSON file, a figure, or a folder of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from relvit.app.utils.files import check_output, check_writable, is_address, write_csv, write_json

FORMATS = (".csv", ".json", ".png")
# A printed table gives the names in its first column at least this many characters of a line.
NAME_WIDTH = 12


def output_files(output: str | None, name: str) -> list[Path]:
    """Check, before hours of work, where figures will be written; make a folder, and return its files called `name`."""
    if output is None:
        return []
    if Path(output).suffix and not Path(output).is_dir():
        check_output(output, FORMATS)
        return [Path(output)]
    if is_address(output):
        raise ValueError(f"output {output} is a remote address: give a folder of this machine")
    check_writable(Path(output))
    Path(output).mkdir(parents=True, exist_ok=True)
    return [Path(output) / f"{name}{suffix}" for suffix in FORMATS]


def write_rows(target: Path, rows: Sequence[dict[str, Any]], draw: Callable[[Path], None]) -> None:
    """Write rows to a CSV or JSON file, or `draw` them into a PNG, and print the file's name."""
    match target.suffix:
        case ".csv":
            # Rows may lack columns, so take the columns of all rows: rows of the first checkpoint have no column for
            # the difference to the first checkpoint.
            columns = list(dict.fromkeys(name for row in rows for name in row))
            write_csv(target, columns, ([row.get(name, "") for name in columns] for row in rows))
        case ".json":
            write_json(target, rows)
        case ".png":
            draw(target)
    print(f"written: {target}", flush=True)


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, wrap: bool = False
) -> None:
    """Print a table of names in the first column and numbers in the others."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0 and not wrap, overflow="fold")
    names = [header[0]]
    for row in rows:
        table.add_row(*row)
        names.append(row[0])
    # Names may contain brackets, which Rich would otherwise read as markup.
    console = Console(highlight=False, markup=False)
    if not wrap:
        # In a narrow terminal Rich would cut digits off and leave columns out. So let only the names become narrower,
        # and leave it to the terminal to break the lines.
        whole = Measurement.get(console, console.options.update(width=10_000), table).maximum
        console.width = max(console.width, whole - max(0, max(map(cell_len, names)) - NAME_WIDTH))
    console.print(table)
