"""A family can be removed (its folder and its name in `relvit.families`), and everything else still works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import relvit

PACKAGE = Path(relvit.__file__).parent
FAMILIES = sorted(path.name for path in (PACKAGE / "families").iterdir() if (path / "__init__.py").is_file())
# The script imports PyTorch, timm and Lightning once, which takes seconds, and forks for each copy of the package.
USE = """
import os, sys, traceback
import lightning.pytorch.cli, matplotlib.figure, timm, torch, torchmetrics

for copy in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        shape = None
        try:
            sys.path.insert(0, copy)
            import relvit.app.training, relvit.app.evaluation.pictures
            assert relvit.__file__.startswith(copy)
            model = timm.create_model("test_relvit", img_size=32, num_classes=3).eval()
            shape = tuple(model(torch.randn(1, 3, 32, 48)).shape)
        except BaseException:
            traceback.print_exc()
        os._exit(shape != (1, 3))
    _, status = os.waitpid(child, 0)
    print(copy, status, flush=True)
"""


@pytest.mark.slow
def test_the_rest_works_without_any_one_family(tmp_path):
    for family in FAMILIES:
        package = tmp_path / family / "relvit"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("configs"))
        shutil.rmtree(package / "families" / family)
        listed = package / "families" / "__init__.py"
        listed.write_text(re.sub(rf'(, )?"?\b{family}\b"?(?(1)|, )', "", listed.read_text()))
    command = [sys.executable, "-c", USE, *(str(tmp_path / family) for family in FAMILIES)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{tmp_path / family} 0" for family in FAMILIES], done.stderr
