"""A user's own datasets: datasets that cannot be used are refused before the training, errors in them are raised."""

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from relvit.app.data import DatasetData, ImageData
from relvit.app.data.at_size import at_size
from relvit.app.training.base_classifier import run_batches

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


def test_a_training_on_images_that_a_test_evaluates_is_refused():
    """The images would come in order and without augmentation."""
    data = Own(Labelled(IMAGES, LABELS))
    data.evaluate_on("train")
    assert len(data.test_dataloader().dataset) == 6
    with pytest.raises(ValueError, match=r"evaluate_on\('train'\) .* call evaluate_on\('test'\) before a training"):
        data.train_dataloader()
    data.evaluate_on("test")
    assert sorted(torch.cat([labels for _, labels in data.train_dataloader()]).tolist()) == [0, 0, 1, 1, 2, 2]


class Stream(IterableDataset):
    def __iter__(self):
        return zip(IMAGES, LABELS, strict=True)


class Labelled(TensorDataset):
    targets = LABELS


class Named(list):
    """Pairs of an image and the name of its class."""

    targets = ("bee",) * 6


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


@pytest.mark.parametrize(
    ("evaluate", "error", "message"),
    [
        (
            lambda data: list(run_batches(torch.clone, data.val_dataloader(), data)),
            TypeError,
            r"the labels of a batch must be a tensor, got \('bee'.*\): give numbers of classes",
        ),
        (
            lambda data: Own(data.built, balance="sampler").train_dataloader(),
            ValueError,
            "targets must be from 0 to 2, the numbers of the classes, got 'bee'",
        ),
    ],
)
def test_labels_that_are_names_are_refused_without_a_trainer_too(evaluate, error, message):
    named = Named([(image, "bee") for image in IMAGES])
    with pytest.raises(error, match=message):
        evaluate(Own(named))


@pytest.mark.parametrize(
    "make",
    [
        lambda dataset: Own(dataset, train_sizes=[8, 16], batch_size=2).train_dataloader(),
        lambda dataset: at_size(Own(dataset), 16),
    ],
)
def test_images_that_cannot_get_another_size_are_refused(make):
    """The images would keep their size, whatever sizes the user gives."""
    with pytest.raises(ValueError, match="Own builds a Labelled, whose images cannot get another size: it has no"):
        make(Labelled(IMAGES, LABELS))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_an_empty_dataset_is_refused(split):
    data = Own(Subset(Labelled(IMAGES, LABELS), []))
    data.evaluate_on("test")
    with pytest.raises(ValueError, match=rf"{split} of Own is empty: check where it looks for images"):
        getattr(data, f"{split}_dataloader")()


def test_an_empty_test_is_refused_before_the_training():
    """Without images, a test after the training would silently be left out."""
    images = [(np.zeros((8, 12, 3), np.uint8), 0)] * 2
    data = DatasetData(images, images, test=[], class_names=["ant", "bee"])
    with pytest.raises(ValueError, match="the test dataset is empty: check where it looks for images"):
        data.setup("fit")


class Ends(Labelled):
    """A dataset whose item 4 raises StopIteration, as `next` does at the end of an iterator."""

    transform = None

    def __getitem__(self, index):
        return super().__getitem__(index) if index != 4 else next(iter(()))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("split", "options"), [("train", {}), ("train", {"train_sizes": [8]}), ("val", {}), ("predict", {})]
)
def test_a_stop_iteration_of_the_dataset_is_an_error(split, options, workers):
    """A loader takes this error for the end of the images, so that the other images would silently be left out."""
    data = Own(Ends(IMAGES, LABELS), batch_size=2, **options)
    data.num_workers = workers
    batches = iter(getattr(data, f"{split}_dataloader")())
    with pytest.raises(RuntimeError, match="item 4 of Ends raises StopIteration: correct the code that makes the item"):
        list(batches)
    if workers:
        # Without this call the workers of an unfinished iterator end seconds later, while Python waits for them.
        batches._shutdown_workers()


def test_a_stop_iteration_of_items_that_are_read_at_once_is_an_error():
    data = Own(Subset(Ends(IMAGES, LABELS), range(1, 6)), batch_size=2)
    with pytest.raises(RuntimeError, match=r"one of the items \[2, 3\] of Subset raises StopIteration: correct"):
        list(data.val_dataloader())


class Misspelt(Labelled):
    """A dataset whose labels are computed by code with an error."""

    @property
    def targets(self):
        return self.lables

    @property
    def classes(self):
        return self.nmaes


class PassedOn(torch.utils.data.Dataset):
    """A dataset that takes its attributes from another one."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getattr__(self, name):
        return getattr(self.dataset, name)


def test_attributes_of_a_dataset_may_be_passed_on():
    data = DatasetData(PassedOn(Labelled(IMAGES, LABELS)), class_names=["ant", "bee", "cat"], balance="loss")
    assert data.dataset("train").targets == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda wrong: Own(wrong, balance="loss").setup("fit"), "'lables'"),
        (lambda wrong: DatasetData(wrong, class_names=["ant", "bee", "cat"]), "'nmaes'"),
        (lambda wrong: DatasetData(wrong), "'nmaes'"),
    ],
)
def test_an_attribute_error_in_the_labels_of_a_dataset_is_raised(make, message):
    with pytest.raises(AttributeError, match=message):
        make(Misspelt(IMAGES, LABELS))
