"""Names of data modules in configurations and checkpoints."""

from relvit.app.data import DigitsData
from relvit.app.data.registry import class_path_of, imported_data_module


def test_relvits_classes_are_named_by_their_package_and_a_users_class_by_its_module():
    mine = type("DigitsData", (DigitsData,), {"__module__": "mine"})
    assert class_path_of(DigitsData) == f"{DigitsData.__module__.partition('.modules')[0]}.DigitsData"
    assert class_path_of(mine) == "mine.DigitsData"
    for cls in (DigitsData, mine):
        assert imported_data_module(class_path_of(cls)) is cls
    assert imported_data_module("relvit.DigitsData") is None
