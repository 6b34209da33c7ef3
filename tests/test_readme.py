"""The README's Python runs as it stands there, from top to bottom."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["x"].shape == (2, 140, 64)
    assert (tmp_path / "model.onnx").is_file()
