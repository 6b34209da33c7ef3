"""The README's Python runs as it stands there, from top to bottom."""

import re
import shutil
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run(run, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(run / "checkpoints" / "best.ckpt", "best.ckpt")
    shutil.copytree(photos, "photos")
    for name in ("photo.jpg", "other.png"):
        shutil.copy("photos/test/owl/0.jpg", name)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["x"].shape == (2, 140, 64)
    assert (tmp_path / "model.onnx").is_file()
    assert names["features"].shape == (2, 16)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("photos")] == [
        f"photos/test/{name}/{number}.jpg" for name in ("cat", "dog", "owl") for number in range(6)
    ]
