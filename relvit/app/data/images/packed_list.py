"""List in one block of memory, which forked DataLoader workers share without copy-on-write, for millions of images."""

import pickle
from array import array
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any


class PackedList(Sequence[Any]):
    """Items that are pickled one after the other, so that each access makes a new item.

    Python counts the references to an object in the object itself. So a worker that only reads the items of a list
    writes into their memory, and the system then copies that memory for each worker: several gigabytes per worker for
    ImageNet-21k's 14 million images.

    Args:
        items: The items.
        shared: Objects that many items refer to, such as an opened dataset; they are kept, not pickled.
    """

    def __init__(self, items: Iterable[Any], shared: Iterable[Any] = ()) -> None:
        self._shared = list(shared)
        self._ends = array("q", [0])
        stream = BytesIO()
        pickler = _Pickler(stream, self._shared)
        for item in items:
            pickler.dump(item)
            # Clear the memo, because pickle would replace an object that an earlier item contains, too, by a reference
            # to that item.
            pickler.clear_memo()
            self._ends.append(stream.tell())
        self._block = stream.getvalue()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        index = range(len(self))[index]
        return _Unpickler(BytesIO(self._block[self._ends[index] : self._ends[index + 1]]), self._shared).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: BytesIO, shared: Sequence[Any]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.numbers = {id(each): number for number, each in enumerate(shared)}

    def persistent_id(self, value: Any) -> int | None:
        return self.numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BytesIO, shared: Sequence[Any]) -> None:
        super().__init__(stream)
        self.shared = shared

    def persistent_load(self, number: int) -> Any:
        return self.shared[number]
