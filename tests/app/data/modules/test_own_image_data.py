"""A user's own subclass of `ImageData`: datasets that it must not build are refused before the training."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from relvit.app.data import ImageData

IMAGES, LABELS = torch.zeros(6, 3, 8, 12), torch.arange(6) % 3


class Own(ImageData):
    """A data module whose every split is the given dataset."""

    def __init__(self, dataset, **options):
        super().__init__(["ant", "bee", "cat"], 3, img_size=(8, 12), num_workers=0, **options)
        self.built = dataset

    def missing(self, split):
        return None

    def build(self, split):
        return self.built


class Stream(IterableDataset):
    def __iter__(self):
        return zip(IMAGES, LABELS, strict=True)


class Labelled(TensorDataset):
    targets = LABELS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Own(Stream()).setup("validate"),
            "val of Own is a Stream, which has no length .*: give a dataset with",
        ),
        (lambda: Own(Stream(), balance="loss").class_weights, "train of Own is a Stream, which has no length"),
        (lambda: Own(iter(LABELS)).train_dataloader(), r"train of Own is \w+ \w+, which has no length"),
    ],
)
def test_a_dataset_that_can_only_be_iterated_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("balance", ["loss", "sampler"])
def test_to_balance_a_dataset_without_known_labels_is_refused(balance):
    """The classifier takes an AttributeError for data without class weights, and would train without balance."""
    unlabelled = TensorDataset(IMAGES, LABELS)
    Own(unlabelled).setup("fit")
    Own(Labelled(IMAGES, LABELS), balance=balance).setup("fit")
    with pytest.raises(
        ValueError, match=r"balance needs the labels of train of Own, a TensorDataset: give .*`targets`"
    ):
        Own(unlabelled, balance=balance).setup("fit")
