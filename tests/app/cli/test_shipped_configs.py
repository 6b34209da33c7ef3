"""The configurations that relvit ships are found in a clone and in a wheel."""

import runpy
import shutil

import pytest
from processes import ROOT

from relvit.app.cli import main, shipped_configs


@pytest.mark.parametrize("place", ["configs", "relvit/configs"])
def test_beside_the_package_and_inside_it(place, tmp_path):
    module = tmp_path / "relvit" / "app" / "cli" / "shipped_configs.py"
    module.parent.mkdir(parents=True)
    shutil.copy(shipped_configs.__file__, module)
    (file := tmp_path / place / "more" / "mine.yaml").parent.mkdir(parents=True)
    file.touch()
    assert runpy.run_path(module)["shipped_configs"]() == {"mine": file}


def test_a_clone_takes_the_file_and_the_name(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for given in ("configs/digits.yaml", "digits"):
        assert main(["fit", "--config", given, "--print_config"]) == 0
        assert "class_path: relvit.app.data.DigitsData" in capsys.readouterr().out
