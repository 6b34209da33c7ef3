"""Names of data modules, as configurations and checkpoints give them."""

import sys

import pytest
import yaml

from relvit.app.data import DigitsData
from relvit.app.data.registry import class_path_of, imported_data_module, named_data_module


def test_relvits_classes_are_named_by_their_package_and_a_users_class_by_its_module():
    mine = type("DigitsData", (DigitsData,), {"__module__": "mine"})
    assert class_path_of(DigitsData) == f"{DigitsData.__module__.partition('.modules')[0]}.DigitsData"
    assert class_path_of(mine) == "mine.DigitsData"
    for cls in (DigitsData, mine):
        assert imported_data_module(class_path_of(cls)) is cls
    assert imported_data_module("relvit.DigitsData") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DigitData", r"no data module 'DigitData' \(did you mean 'DigitsData'\?\): give one of '.*, or MODULE.CLASS"),
        ("own_broken.Mine", r"'own_broken' cannot be imported \(No module named 'not_installed'\)$"),
        (
            "own_gone.Mine",
            r"'own_gone' cannot be imported \(No module named 'own_gone'\); run the command in the folder",
        ),
        ("own_data.Mien", r"'own_data' has no 'Mien' \(did you mean 'Mine'\?\)"),
        ("own_data.NUMBER", "must be a subclass of relvit.app.data.DatasetData"),
        ("own_data.ImageData", "must be a subclass of relvit.app.data.DatasetData, whose"),
        ("own_data.DigitsData", "give relvit.app.data.DigitsData"),
    ],
)
def test_why_a_name_is_no_data_module(name, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_broken.py").write_text("import not_installed")
    text = "from relvit.app.data import DigitsData, ImageData\nNUMBER = 1\nclass Mine(DigitsData): ..."
    (tmp_path / "own_data.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        named_data_module(name)
    assert named_data_module("own_data.Mine").__name__ == "Mine"
    assert named_data_module("relvit.app.data.DigitsData") is DigitsData
    monkeypatch.delitem(sys.modules, "own_data")


def test_the_file_of_an_installed_module_of_the_same_name_as_a_users_is_told(fails):
    note = f"; that module is {yaml.__file__}"
    assert f"module 'yaml' has no attribute 'Mine'{note}" in fails(["fit", "--data=yaml.Mine"])
    with pytest.raises(ValueError, match=f"module 'yaml' has no 'Mine'{note}"):
        named_data_module("yaml.Mine")


def test_the_last_definition_of_a_class_in_a_notebook_counts():
    first, last = (type("Mine", (DigitsData,), {"__module__": "notebook"}) for _ in range(2))
    assert imported_data_module("notebook.Mine") is last is not first
