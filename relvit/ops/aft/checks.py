"""What the operations of attention-free transformers demand of their arguments."""

from __future__ import annotations

from torch import Tensor

from relvit.ops.checks import check_shape, check_tokens
from relvit.ops.grid import Grid


def check_contents(query: Tensor, key: Tensor, value: Tensor, grid: Grid) -> None:
    """Raise unless queries, keys, values and the grid fit together; see `relvit.ops.aft_full`."""
    check_tokens("query", query, "grid", grid)
    batch, heads, count, width = query.shape
    shared = isinstance(key, Tensor) and key.dim() == 4 and key.shape[3] == 1
    check_shape("key", key, (batch, heads, count, 1 if shared else width))
    check_shape("value", value, (batch, heads, count, width))
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected the query's {query.dtype}")
    named = {"key": key, "value": value, "grid.coords": grid.coords, "grid.valid": grid.valid}
    for name, tensor in named.items():
        _check_device(name, tensor, query)


def check_pairs(bias: Tensor, query: Tensor, grid: Grid) -> None:
    """Raise unless `bias` has an entry for each pair of places of the grid, for all heads or for each."""
    places = grid.prefix + grid.height * grid.width
    lead = (query.shape[1],) if isinstance(bias, Tensor) and bias.dim() == 3 else ()
    check_shape("bias", bias, (*lead, places, places))
    _check_device("bias", bias, query)


def check_weight(weight: Tensor, query: Tensor) -> None:
    """Raise unless `weight` is a window of odd sizes for each head."""
    check_shape("weight", weight, (query.shape[1], "rows", "columns"))
    if weight.shape[1] % 2 == 0 or weight.shape[2] % 2 == 0:
        raise ValueError(
            f"weight has a window of {weight.shape[1]} x {weight.shape[2]}, expected odd sizes around the query"
        )
    _check_device("weight", weight, query)


def _check_device(name: str, tensor: Tensor | None, query: Tensor) -> None:
    if tensor is not None and tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device}, expected the query's device, {query.device}")
