"""The README and the pages under docs/, and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    "docs/benchmarks/README.md",
]


def text(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)
