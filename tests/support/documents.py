"""The README, the pages below docs/, and their code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    "docs/benchmarks/README.md",
]
# Pages about other libraries, which `pytest -m elsewhere` runs.
ELSEWHERE = sorted(f"docs/elsewhere/{path.name}" for path in (ROOT / "docs" / "elsewhere").glob("*.md"))


def text(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)
