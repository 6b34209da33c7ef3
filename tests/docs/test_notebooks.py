"""The notebooks run from the first to the last cell, and their committed outputs are from one such run."""

import json
import os
import re
import subprocess
import sys

import pytest
from documents import ROOT, text

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = {"make_your_sam_smaller", "retrofit_a_vit", "see_relative_positions", "train_on_your_photos"}
# This pattern finds absolute paths, dates with a time (as in names of runs), and memory addresses.
OF_A_MACHINE = r"(?<![\w.])/(?:home|root|tmp|Users|work|opt|usr|var|mnt)/|\d{4}-\d\d-\d\d[_T ]\d\d|0x[0-9a-f]{6}"


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output["output_type"] != "error"
        # Progress bars also write to stderr, so look for warnings and errors in the text of stderr.
        assert output.get("name") != "stderr" or not re.search("warn|error", "".join(output["text"]), re.IGNORECASE)
        printed = [output.get("text", []), output.get("data", {}).get("text/plain", [])]
        assert not re.search(OF_A_MACHINE, "".join("".join(lines) for lines in printed)), printed
    assert not any("execution" in cell["metadata"] for cell in cells)
    assert path.stat().st_size < 500_000


def test_notebooks_are_linked():
    pages = "".join(text(f"docs/{page}.md") for page in ("retrofit", "sam", "show", "train_your_images"))
    assert {path.stem for path in NOTEBOOKS} == NAMES == set(re.findall(r"\(\.\./notebooks/(\w+)\.ipynb\)", pages))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    if path.stem == "make_your_sam_smaller":
        pytest.importorskip("transformers", reason="pip install 'relvit[elsewhere]' brings transformers")
    copy = tmp_path / path.name
    # Two epochs and a few batches are enough, because the trainings need not learn much here.
    content = re.sub(r"(epochs[ =])\d+", r"\g<1>2", path.read_text())
    copy.write_text(content.replace("relvit fit ", "relvit fit --trainer.limit_train_batches 2 "))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, ROOT / "notebooks" / "execute.py", copy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    executed = code_cells(copy)
    assert [cell["execution_count"] for cell in executed] == [*range(1, len(executed) + 1)]
