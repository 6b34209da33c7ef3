"""What PyTorch 2.8 to 2.10 cannot do and newer versions can: compile `_replace`, build the GPU's kernels.

`torch.compile` of PyTorch 2.8 cannot slice a named tuple, so functions that are compiled turn it into a plain tuple and
slice the plain tuple, as in `(*grid,)[:2]`. PyTorch 2.8 cannot compile `next` with a default either.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from packaging.version import Version

Record = TypeVar("Record", bound=type[tuple[Any, ...]])

_VERSION = Version(torch.__version__)
COMPILES_REPLACE = Version("2.11") <= _VERSION
# PyTorch 2.8 brings Triton 3.4, whose `tl.range` lacks the argument `disable_licm`, which relvit's kernels need.
BUILDS_KERNELS = Version("2.9") <= _VERSION


def compiled_replace(record: Record) -> Record:
    """Give a class derived from `NamedTuple` a `_replace` that `torch.compile` of PyTorch 2.8 to 2.10 accepts, too."""
    if COMPILES_REPLACE:
        return record
    fields = record._fields

    def replace(self: tuple[Any, ...], /, **changes: Any) -> tuple[Any, ...]:
        return record(*map(changes.get, fields, self))

    record._replace = replace
    return record
