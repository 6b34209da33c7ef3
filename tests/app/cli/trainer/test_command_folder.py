"""What commands print and write at their ends: the numbers of images of the classes."""

from types import SimpleNamespace

import pytest

from relvit.app.cli.trainer.command_folder import class_counts
from relvit.app.training.labels import SeveralLabels


def test_targets_of_several_labels_are_not_made():
    data = SimpleNamespace(dataset=lambda split: pytest.fail("asked for the dataset"))
    model = SimpleNamespace(labels=SeveralLabels([0.5, 0.5]))
    assert class_counts(SimpleNamespace(datamodule=data, lightning_module=model), "val") is None
