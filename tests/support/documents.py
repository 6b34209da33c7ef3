"""The README and the pages under docs/, and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    "docs/benchmarks/README.md",
]
# Pages about other libraries, which run in a suite of their own: `pytest -m elsewhere`.
ELSEWHERE = sorted(f"docs/elsewhere/{path.name}" for path in (ROOT / "docs" / "elsewhere").glob("*.md"))


def text(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)
