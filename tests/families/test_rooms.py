"""A room can be deleted: its folder and its name in `relvit.families`; everything else still works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import relvit

PACKAGE = Path(relvit.__file__).parent
ROOMS = sorted(path.name for path in (PACKAGE / "families").iterdir() if (path / "__init__.py").is_file())
USE = """
import timm, torch, relvit.training, relvit.evaluation.pictures
model = timm.create_model("test_relvit", img_size=32, num_classes=3).eval()
print(tuple(model(torch.randn(1, 3, 32, 48)).shape))
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_the_rest_works_without_a_room(room, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "relvit", ignore=shutil.ignore_patterns("__pycache__", "configs"))
    families = tmp_path / "relvit" / "families"
    shutil.rmtree(families / room)
    listed = (families / "__init__.py").read_text()
    (families / "__init__.py").write_text(re.sub(rf'(, )?"?\b{room}\b"?(?(1)|, )', "", listed))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 3)", done.stderr
