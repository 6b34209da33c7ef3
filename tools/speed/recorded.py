"""Command line of tools that measure models by name, with a table of all versions in `docs/benchmarks`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The folder above contains the modules that are imported next.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark import surroundings
from benchmark_report import replaced

from relvit.utils.messages import check_choice

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


class Tool(NamedTuple):
    """What such a tool measures, and how it shows its figures.

    Attributes:
        name: the name of the tool's file, and of the file with the figures of all versions.
        known: names of all models.
        default: the names of the models that the tool measures if none are given.
        figures: a function that measures models: names of models and the tool's numbers -> figures by name.
        table: a function that shows figures as Markdown.
        table_of_versions: a function that shows recorded runs as Markdown.
    """

    name: str
    known: Sequence[str]
    default: Sequence[str]
    figures: Callable[..., dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    table_of_versions: Callable[[Sequence[dict[str, Any]]], str]

    @property
    def begin(self) -> str:
        """The line before the table of versions."""
        return f"<!-- written by tools/speed/{self.name}.py -->"

    def write(self, rows: dict[str, Any], folder: Path) -> None:
        """Append the figures to the folder's `name`.jsonl, and write the table of versions into `README.md`."""
        lines, page = folder / f"{self.name}.jsonl", folder / "README.md"
        head = {"date": time.strftime("%Y-%m-%d", time.gmtime()), **surroundings("cpu")}
        with lines.open("a") as file:
            file.write(json.dumps({**head, "models": rows}) + "\n")
        runs = [json.loads(line) for line in lines.read_text().splitlines()]
        page.write_text(replaced(page.read_text(), self.table_of_versions(runs), self.begin))

    def main(self, description: str | None, arguments: Sequence[str] | None, **numbers: int) -> None:
        """Measure and print; with `--write` also write.

        Args:
            description: help of the command line.
            arguments: arguments of the command line; None: the arguments of the process.
            **numbers: further arguments of `figures`, and their defaults, each of which is an option.

        Raises:
            ValueError: a name that is not known.
        """
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--names", nargs="+", default=self.default, help=f"of {', '.join(self.known)}")
        for name, default in numbers.items():
            parser.add_argument(f"--{name}", type=int, default=default)
        parser.add_argument("--write", action="store_true", help="a row for this version in docs/benchmarks")
        given = parser.parse_args(arguments)
        for name in given.names:
            check_choice("--names", name, tuple(self.known))
        rows = self.figures(given.names, **{name: getattr(given, name) for name in numbers})
        print(self.table(rows))
        if given.write:
            self.write(rows, FOLDER)
