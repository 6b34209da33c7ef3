"""What may be asked for where a model is built by the word of a file or of a configuration."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from relvit.utils.memory import available_memory

# Far beyond every model there is; what is meant to be smaller but is not is met by the memory that it takes.
LARGEST = 10**6
DEEPEST = 1000
MOST_TENSORS = 100_000


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a model, at any depth of lists and dictionaries, that cannot be meant.

    Raises:
        ValueError: a number beyond a million, or more than a thousand layers.
    """
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            check_numbers({f"{name}.{key}": inner for key, inner in value.items()})
        elif isinstance(value, Sequence) and not isinstance(value, str):
            check_numbers({f"{name}[{place}]" if "[" in name else name: inner for place, inner in enumerate(value)})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = DEEPEST if "depth" in name or "layers" in name else LARGEST
            # NaN is no number that a model could take, either.
            if not abs(value) <= most:
                raise ValueError(f"{name} {value:.6g} cannot be meant: numbers of a model go up to {most}")


class TooLargeError(ValueError):
    """A model that needs more memory than there is, or is of more parts than any model."""


def check_memory(build: Callable[[], nn.Module]) -> None:
    """Try out, taking next to no memory, whether there is enough for the module that `build` makes.

    Where it cannot be tried out, `MemoryLimit` is what is left.

    Raises:
        TooLargeError: there is not, or it is made of more than a hundred thousand tensors.
    """
    limit = MemoryLimit(of_meta=True)
    # What is drawn at random comes out as if nothing had been tried.
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception), torch.device("meta"), limit:
        build()
    if limit.refusal is not None:
        raise limit.refusal


class MemoryLimit(TorchDispatchMode):
    """Within it, tensors that together need more memory than there is are refused before they are made.

    Args:
        of_meta: count tensors on the meta device, too, as if they were to be filled.

    Attributes:
        refusal: what has been raised.

    Raises:
        TooLargeError: they do, or they are more than a hundred thousand.
    """

    def __init__(self, of_meta: bool = False) -> None:
        super().__init__()
        self.of_meta = of_meta
        self.refusal: TooLargeError | None = None
        left = available_memory()
        self.left = math.inf if left is None else left
        self.tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (place := _place_of_size(func)) is not None:
            size = kwargs["size"] if "size" in kwargs else args[place]
            if self.of_meta or torch.device(kwargs.get("device") or "cpu").type != "meta":
                self._take(size, kwargs.get("dtype") or torch.get_default_dtype())
        return func(*args, **kwargs)

    def _take(self, size: Sequence[int], dtype: torch.dtype) -> None:
        self.tensors += 1
        needed = math.prod(size) * dtype.itemsize
        if needed > self.left:
            part = " x ".join(map(str, size))
            self.refusal = TooLargeError(f"the model needs more memory than there is: a part of it has {part} numbers")
        elif self.tensors > MOST_TENSORS:
            self.refusal = TooLargeError(f"the model has more than {MOST_TENSORS} tensors: that cannot be meant")
        if self.refusal is not None:
            raise self.refusal
        self.left -= needed


@cache
def _place_of_size(func: Any) -> int | None:
    """Where an operation that makes a new tensor, and takes none, has its size; None for all others."""
    names = [argument.name for argument in func._schema.arguments]
    makes = not any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return names.index("size") if makes and "size" in names else None
