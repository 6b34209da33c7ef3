"""Write the report of all lines: `python tools/study/study_report.py [docs/study]`.

The tool writes `tables.md` and the figures beside the folders `runs` and `photographs`, which contain the lines, and
the tables of `README.md` between their marks; the text around these tables is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import photograph_tables
import study_questions
from study_lines import FIGURES, RECIPES, Line, grouped, read
from study_tables import figures_table, reach_table

SOURCE = Path(__file__).parents[2] / "docs" / "study"
INTRODUCTION = """# All runs of the study

Written by `python tools/study/study_report.py`.
[What the figures say](README.md).

A table begins with a model without relative positions: accuracy in percent, mean over seeds ± standard error (none for
one seed). Other rows are differences to it in points, paired by seed and precision. All sizes: the mean over log2(size)
from 16 to 64 px. `resize` scales the image, `field` keeps the scale of objects: CIFAR-10's images are continued by
reflection, photographs show more. `relpos` and `rope-*` without `-vit-start` begin with a LayerScale near zero, unlike
the rest.

# CIFAR-10

{images[train]:,} training and {images[test]:,} test images, 8 epochs; the long trainings 50,000, 9,800 and 25; {gpu}
of {runs} runs on a GPU. Models of patches of 4 px have width 128, depth 4, 4 heads, average pooling, no class token.
Trained at 20 to 44 px: each step at one of 20, 24 ... 44.
"""
PHOTOGRAPHS = {"imagenette": "Imagenette", "cifar10": "Fine-tunings on CIFAR-10"}


def tables_page(lines: Sequence[Line], photographs: Sequence[Line]) -> str:
    """Return the page of all tables."""
    short = next((line for line in lines if not line["recipe"].startswith("long")), lines[0])
    parts = [
        INTRODUCTION.format(images=short["images"], gpu=sum("gpu" in line for line in lines), runs=len(lines)),
    ]
    for recipe, trained in RECIPES.items():
        if groups := grouped(lines, recipe):
            parts += [f"## {trained.capitalize()}\n", figures_table(groups, FIGURES)]
            for protocol in ("resize", "field"):
                if found := reach_table(groups, protocol):
                    parts.append(f"What `--reach` changes by `{protocol}`:\n\n{found}")
    for setting, title in PHOTOGRAPHS.items():
        if found := [line for line in photographs if line["setting"] == setting]:
            parts += [f"# {title}\n", photograph_tables.tables(found)]
    hours = sum(line["processor_minutes"] for line in lines) / 60
    given = {name: sorted({line["versions"][name] for line in lines}) for name in lines[-1]["versions"]}
    versions = ", ".join(f"{name} {'/'.join(found)}" for name, found in given.items())
    parts.append(f"CIFAR-10 took {hours:.1f} processor hours; {versions}.\n")
    return "\n".join(parts)


def filled(page: str, tables: dict[str, str]) -> str:
    """Return a page with these tables between their marks."""
    for name, table in tables.items():
        begin = f"<!-- {name}, written by tools/study/study_report.py -->"
        pattern = re.compile(f"({re.escape(begin)}).*?(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda found, table=table: f"{found[1]}\n\n{table}\n{found[2]}", page)
        if count != 1:
            raise ValueError(f"the page has {begin} {count} times, not once")
    return page


def main(source: Path = SOURCE) -> None:
    """Write the tables and figures into the folder that has the folders `runs` and `photographs`."""
    lines, photographs = read(source / "runs"), read(source / "photographs")
    found = study_questions.answers(lines, photographs)
    page = (source / "README.md").read_text()
    (source / "README.md").write_text(filled(page, {name: answer.table for name, answer in found.items()}))
    (source / "tables.md").write_text(tables_page(lines, photographs))
    for name, answer in found.items():
        answer.draw(source / f"{name}.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
