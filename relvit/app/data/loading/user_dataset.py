"""Checks of a user's dataset: it has numbered items, is not empty, and no StopIteration ends an epoch early."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from relvit.app.utils.exceptions import attribute_of
from relvit.utils.messages import an


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a user's dataset from which no batches can be made.

    Args:
        dataset: A dataset that a user has given, or that the user's data module has built.
        name: The name of the dataset, for messages.

    Raises:
        TypeError: The dataset has no length or no numbered items, or is a DataFrame.
    """
    # The items of a table of pandas or polars are columns, not rows.
    if type(dataset).__name__ == "DataFrame":
        raise TypeError(
            f"{name} is a DataFrame: write its paths and labels into a CSV file for ImageListData, or give a dataset"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{name} is {an(type(dataset).__name__)}, which has no length or no numbered items: give a dataset with "
            "__len__ and __getitem__, or train an ImageClassifier on a DataLoader of your own"
        )


def check_built(dataset: Any, name: str, balanced: bool) -> None:
    """Refuse a dataset that a data module has built, see also `check_dataset`.

    Args:
        dataset: The dataset.
        name: The name of the dataset, for messages.
        balanced: Whether `balance` needs the labels of the dataset.

    Raises:
        TypeError: The dataset has no length or no numbered items.
        ValueError: The dataset is empty, or the labels are needed, and the dataset has no `targets`.
    """
    check_dataset(dataset, name)
    if not len(dataset):
        # A training would go on without these images, for example without a validation.
        raise ValueError(f"{name} is empty: check where it looks for images")
    if balanced and attribute_of(dataset, "targets") is None:
        raise ValueError(
            f"balance needs the labels of {name}, {an(type(dataset).__name__)}: give that dataset the attribute "
            "`targets`, its labels in order, or leave balance out"
        )


class LoadedDataset(Dataset[Any]):
    """Dataset with the items of another one, in which StopIteration becomes RuntimeError.

    A loader takes a StopIteration for the end of the images, and would silently leave out the rest of them.

    Args:
        dataset: A map-style dataset.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._read(self.dataset.__getitem__, index)

    def __getitems__(self, indices: list[Any]) -> Any:
        at_once = getattr(self.dataset, "__getitems__", None)
        return [self[index] for index in indices] if at_once is None else self._read(at_once, indices)

    def _read(self, read: Callable[[Any], Any], wanted: Any) -> Any:
        try:
            return read(wanted)
        except StopIteration as error:
            item = f"item {wanted}" if isinstance(wanted, int) else f"one of the items {wanted}"
            raise RuntimeError(
                f"{item} of {type(self.dataset).__name__} raises StopIteration: correct the code that makes the item"
            ) from error
