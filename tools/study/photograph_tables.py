"""Print tables of the lines of `photographs.py`: `python tools/study/photograph_tables.py FILE.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a file; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
