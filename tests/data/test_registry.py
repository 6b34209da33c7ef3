"""Names of data modules in configurations of earlier releases."""

import pytest

from relvit.data.registry import public_class_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("relvit.data.folder.ImageFolderData", "relvit.data.ImageFolderData"),
        ("data: {class_path: relvit.data.modules.digits.DigitsData}", "data: {class_path: relvit.data.DigitsData}"),
        ("relvit.data.DigitsData", None),
        ("mine.relvit.data.folder.MyData", None),
        ("photos/relvit.data.folder.Images/train", None),
        ("images-relvit.data.folder.Images", None),
        ("relvit.data.folder.Images.tar", None),
        ("relvit.data.folder.Images-2", None),
    ],
)
def test_only_names_of_classes_are_shortened(text, expected):
    assert public_class_path(text) == (expected or text)
