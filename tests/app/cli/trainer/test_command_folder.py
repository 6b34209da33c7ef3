"""What commands print and write at their ends: the numbers of images of the classes."""

from types import SimpleNamespace

import pytest

from relvit.app.cli.trainer.command_folder import class_counts


def test_targets_of_several_labels_are_not_made():
    data = SimpleNamespace(multi_label=True, dataset=lambda split: pytest.fail("asked for the dataset"))
    assert class_counts(SimpleNamespace(datamodule=data), "val") is None
