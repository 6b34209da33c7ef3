"""Check tensors that a file holds before anything computes with them: kind, size in memory, finite values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# relvit's checks and conversions work with these dtypes, but not with quantised tensors or floats of 8 bits or less.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# All tensors of a file together may have at most MOST_NAMES times as many bytes as the file stores for tensors, plus
# SMALL bytes. More bytes than are stored are usual for shared weights, which are stored once and have several names.
MOST_NAMES, SMALL = 16, 2**24


def check_tensors(content: Any, path: str) -> None:
    """Refuse tensors that are not plain tensors in memory, or that represent many more bytes than are stored.

    A tensor may repeat one stored number any number of times (`Tensor.expand`). So a file of some kilobytes may
    describe a tensor with more values than any memory holds, and the first operation on it would fail or exhaust the
    memory.

    Args:
        content: nested dictionaries, lists and tuples with tensors in them.
        path: the file, for the message.

    Raises:
        ValueError: a tensor, which the message names, is not on the CPU, is sparse or quantised, or has a dtype that is
            not in `DTYPES`.
        ValueError: the tensors stand for more bytes than `MOST_NAMES` times the stored bytes plus `SMALL`.
    """
    stored: dict[int, int] = {}
    largest, name, described = 0, "", 0
    for found, tensor in _tensors(content):
        kind = "sparse" if tensor.layout is not torch.strided else "quantised" if tensor.is_quantized else tensor.dtype
        if tensor.device.type != "cpu":
            raise ValueError(f"{path} holds {found} without its values (device {tensor.device}): take another file")
        if kind not in DTYPES:
            raise ValueError(
                f"{path} holds {found} as a {str(kind).removeprefix('torch.')} tensor; dense ones of 16 bits or more "
                "can be read: convert it by .to_dense() or .float(), or take another file"
            )
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        size = tensor.numel() * tensor.element_size()
        described += size
        if size > largest:
            largest, name = size, f"{found} of shape {tuple(tensor.shape)}"
    held = sum(stored.values())
    if described > MOST_NAMES * held + SMALL:
        raise ValueError(
            f"{path} stores {held:,} bytes of tensors that stand for {described:,}, the largest is {name}: tensors "
            "must store all their values (Tensor.contiguous)"
        )


def check_finite(weights: Mapping[str, Tensor], path: str) -> None:
    """Refuse weights that are infinite or NaN, or would become infinite in single precision.

    Raises:
        ValueError: A weight is not finite; the message names the first tensor with such a weight.
    """
    most = torch.finfo(torch.float32).max
    for name, tensor in weights.items():
        numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if not numbers.is_floating_point() or not numbers.numel():
            continue
        # NaN is refused, too: if any number is NaN, the extremes are NaN, and comparisons with NaN are false.
        if not all(abs(extreme.item()) <= most for extreme in numbers.aminmax()):
            raise ValueError(
                f"{path} holds values in {name} that are infinite or not a number: take another checkpoint"
            )


def _tensors(content: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in nested values with their names."""
    waiting: list[tuple[str, Any]] = [("", content)]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        # A list may be an item of many lists, or of itself, so visit each object once.
        if id(value) in seen and not isinstance(value, Tensor):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name or "a tensor", value
        elif isinstance(value, Mapping):
            waiting += ((f"{name}.{key}" if name else str(key), inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            waiting += ((name, inner) for inner in value)
