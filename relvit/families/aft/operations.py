"""Public operations of attention-free transformers: checks of the arguments, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.families.aft import reference
from relvit.families.aft.conv import LEAST_DIFFERENCE, window_sums
from relvit.families.aft.pairs import average_of_pairs, place_bias, window_bias
from relvit.families.aft.sums import SPREAD, bounded_exp, exponentials, gated_average, products, running_average
from relvit.ops.checks import check_backend, check_shape, int_pair
from relvit.ops.grid import Grid, check_tokens, key_mask, token_places
from relvit.ops.index_range import check_tensor_size
from relvit.ops.tracing import is_compiling, is_eager, without_autocast

SIMPLE_BACKENDS = ("reference",)
FULL_BACKENDS = ("products", "pairs", "reference")
WINDOW_FORMS = ("convolution", "difference")
CONV_BACKENDS = (*WINDOW_FORMS, "pairs", "reference")


def aft_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    grid: Grid,
    *,
    is_causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute AFT-full: an average of all values, weighted in each channel by keys and a learned bias for each pair.

        out_i = sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)

    All products are elementwise. Source: Zhai et al. 2021 (arXiv 2105.14103), eq. 2.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 24, 16).unbind()  # (B, heads, N, width) each
        >>> aft_full(query, key, value, torch.randn(24, 24), make_grid(4, 6)).shape
        torch.Size([2, 4, 24, 16])

    Args:
        query: (B, heads, N, head_dim), any floating dtype; the paper has one head.
        key: (B, heads, N, head_dim), or (B, heads, N, 1) if all channels of a head share the key; same dtype. Large
            keys cause no overflow and no loss of accuracy.
        value: (B, heads, N, head_dim), same dtype.
        bias: w, (T, T) or (heads, T, T), any floating dtype, for the T = prefix + H W places of the grid: the prefix
            tokens, then the patches in raster order. The first axis is for queries. Tokens with coordinates look up the
            entries of their places.
        grid: layout of the tokens; padding (False in `valid`) adds nothing, whatever numbers the padding holds.
        is_causal: whether to leave out keys that come later in the sequence than the query; only 'pairs' and
            'reference' take True.
        backend: one of

            - 'products': exp(w) times exp(k) v, and exp(w) times exp(k), as matrix products. A bias that is more than
              70 below the query's largest bias counts as 70 below it.
            - 'pairs': a softmax for each query and channel, which is exact for any bias, but takes O(N^2 dim)
              exponentials.
            - 'reference': as 'pairs', in double precision and O(N^2 dim) memory.
            - 'auto': on the CPU 'products' if the biases of each query are at most 70 apart, otherwise 'pairs'. On
              other devices and in graphs, where checking is slow or impossible, 'products'. With `is_causal` 'pairs'.

    Returns:
        (B, heads, N, head_dim), dtype of the query. Exponentials and sums are in float32 at least (for bfloat16 inputs
        on GPUs in bfloat16, except by 'pairs' and 'reference'). A sample without valid tokens gets zeros.

    Raises:
        ValueError: the shape of a tensor does not match the query and the grid, or `key` or `value` has another dtype
            than `query`.
        ValueError: the backend is unknown, or is 'products' with `is_causal`; or a device's kernels cannot index such
            large tensors.
        TypeError: `grid` is not a `Grid`, or another argument is not a tensor of floating-point numbers.
    """
    check_backend(backend, FULL_BACKENDS)
    _check_contents(query, key, value, grid, backend)
    _check_bias(bias, query, grid)
    if backend == "reference":
        return reference.aft_full(query, key, value, bias, grid, is_causal=is_causal)
    if is_causal and backend == "products":
        raise ValueError("backend 'products' has no causal form: use 'auto' or 'pairs'")
    bias = (bias if bias.dim() == 3 else bias[None]).to(torch.promote_types(bias.dtype, torch.float32))
    bottom, top = (extreme(bias.detach(), dim=2, keepdim=True) for extreme in (torch.amin, torch.amax))
    if backend == "auto":
        backend = "pairs" if is_causal or _far_apart(bottom, top) else "products"
    valid = key_mask(grid)
    with without_autocast(query.device):
        if backend == "pairs":
            bias_of = place_bias(grid, query.device)
            return _gate(query, average_of_pairs(key, value, bias, bias_of, valid, is_causal))
        parts, index = exponentials(key, value, valid), None
        if grid.coords is not None:
            index = token_places(grid, query.device)[..., None].expand(parts.shape)
            parts = parts.new_zeros(parts.shape[0], bias.shape[1], parts.shape[2]).scatter_add(1, index, parts)
        sums = products(bounded_exp(bias - top).to(parts.dtype), parts, query.shape[3])
        return gated_average(query, sums if index is None else sums.gather(1, index), valid)


def aft_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    window: int | Sequence[int],
    grid: Grid,
    *,
    is_causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute AFT-local: `aft_full` whose bias is zero, not absent, between places that are far apart.

    Every token still attends to all tokens. Source: Zhai et al. 2021 (arXiv 2105.14103), eq. 4, with a distance in rows
    and a distance in columns. For arguments that are not listed here see `aft_full`.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 24, 16).unbind()  # (B, heads, N, width) each
        >>> aft_local(query, key, value, torch.randn(24, 24), 3, make_grid(4, 6)).shape
        torch.Size([2, 4, 24, 16])

    Args:
        window: one number or (rows, columns): the bias is kept for tokens that are less than this number of rows, and
            less than this number of columns, apart. Prefix tokens have no row and column, so pairs with them keep their
            bias. A window of 0 removes all biases, as in `aft_simple`.

    For the result and errors see `aft_full`.
    """
    reach = int_pair("window", window, 0)
    check_tokens("query", query, "grid", grid)
    _check_bias(bias, query, grid)
    bias = local_bias(bias, reach, (grid.height, grid.width), grid.prefix)
    return aft_full(query, key, value, bias, grid, is_causal=is_causal, backend=backend)


def local_bias(bias: Tensor, window: tuple[int, int], size: tuple[int, int], prefix: int) -> Tensor:
    """Set a bias (..., places, places) to zero between places of a grid of `size` that are `window` or more apart."""
    near = []
    for extent, reach in zip(size, window, strict=True):
        index = torch.arange(extent, device=bias.device)
        near.append((index[:, None] - index).abs() < reach)
    mask = (near[0][:, None, :, None] & near[1][None, :, None, :]).flatten(2).flatten(0, 1)
    return torch.where(F.pad(mask, (prefix, 0, prefix, 0), value=min(window) > 0), bias, 0.0)


def aft_simple(
    query: Tensor, key: Tensor, value: Tensor, grid: Grid, *, is_causal: bool = False, backend: str = "auto"
) -> Tensor:
    """Compute AFT-simple: `aft_full` without a bias. All tokens share one average, and each token's query gates it.

        out_i = sigmoid(q_i) * sum_j softmax_j(k_j) v_j

    Source: Zhai et al. 2021 (arXiv 2105.14103), section 3.2. For arguments that are not listed here see `aft_full`.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 24, 16).unbind()  # (B, heads, N, width) each
        >>> aft_simple(query, key, value, make_grid(4, 6)).shape
        torch.Size([2, 4, 24, 16])

    Args:
        is_causal: whether to leave out keys that come later in the sequence than the query, so that each query has its
            own average.
        backend: 'auto' or 'reference'.

    For the result and errors see `aft_full`.
    """
    check_backend(backend, SIMPLE_BACKENDS)
    _check_contents(query, key, value, grid, backend)
    if backend == "reference":
        return reference.aft_simple(query, key, value, grid, is_causal=is_causal)
    valid = key_mask(grid)
    with without_autocast(query.device):
        if is_causal:
            return _gate(query, running_average(key, value, valid))
        return gated_average(query, exponentials(key, value, valid).sum(dim=1, keepdim=True), valid)


def aft_conv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Grid,
    *,
    is_causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute AFT-conv: `aft_full` whose bias depends on the offset from query to key alone, zero outside of a window.

    Every token attends to all tokens, with a bias for tokens inside the window. Source: Zhai et al. 2021 (arXiv
    2105.14103), eq. 6 and section 3.2, in two dimensions; a sequence is a grid of one row. In the paper all channels of
    a head share one key. For arguments that are not listed here see `aft_full`.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 24, 16).unbind()  # (B, heads, N, width) each
        >>> weight = torch.randn(4, 5, 5)  # a window of 5 x 5 offsets for each head
        >>> aft_conv(query, key[..., :1], value, weight, make_grid(4, 6)).shape
        torch.Size([2, 4, 24, 16])

    Args:
        weight: w, (heads, r, c) for a window of r rows and c columns, both odd, any floating dtype. Of each head, entry
            [r // 2 + dy, c // 2 + dx] is for a key dy rows below and dx columns right of the query. For pairs with a
            prefix token w is 0.
        backend: one of

            - 'convolution': a depthwise convolution with exp(w). A w that is more than 70 below the head's largest w
              counts as 70 below it. Pairs outside of the window count here with w = 0.
            - 'difference': a depthwise convolution with exp(w) - 1, as in the paper, with the same limit. If a w is
              below -5, digits are lost; sums are in float32 at least also on GPUs.
            - 'pairs', 'reference': see `aft_full`.
            - 'auto': on the CPU the first of 'difference', 'convolution' and 'pairs' that is exact for the given
              weights. On other devices and in graphs, where checking is slow or impossible, 'convolution'. With
              `is_causal` 'pairs'.

    For the result and errors see `aft_full`.
    """
    check_backend(backend, CONV_BACKENDS)
    _check_contents(query, key, value, grid, backend)
    check_shape("weight", weight, (query.shape[1], "rows", "columns"))
    rows, cols = weight.shape[1:]
    if rows % 2 == 0 or cols % 2 == 0:
        raise ValueError(f"weight has a window of {rows} x {cols}, expected odd sizes around the query")
    if backend == "reference":
        return reference.aft_conv(query, key, value, weight, grid, is_causal=is_causal)
    if is_causal and backend in WINDOW_FORMS:
        raise ValueError(f"backend {backend!r} has no causal form: use 'auto' or 'pairs'")
    weight, outside = weight.to(torch.promote_types(weight.dtype, torch.float32)), True
    if not is_compiling():
        # Cut off the part of the window for offsets that are larger than the grid. Pairs outside of the window, and
        # pairs with a prefix token, have w = 0. If the rest of the window covers all patches, and there is no prefix
        # token, there are no such pairs, so `bottom` and `top` below do not include 0.
        down, right = min(rows // 2, grid.height - 1), min(cols // 2, grid.width - 1)
        weight = weight[:, rows // 2 - down : rows // 2 + down + 1, cols // 2 - right : cols // 2 + right + 1]
        outside = grid.prefix > 0 or (down, right) != (grid.height - 1, grid.width - 1)
    bottom, top = (extreme(weight.detach(), dim=(1, 2), keepdim=True) for extreme in (torch.amin, torch.amax))
    if outside:
        bottom, top = bottom.clamp_max(0), top.clamp_min(0)
    if backend == "auto":
        backend = "pairs" if is_causal or _far_apart(bottom, top) else "convolution"
        if backend == "convolution" and _values_known(bottom) and bottom.min() >= LEAST_DIFFERENCE:
            backend = "difference"
    valid = key_mask(grid)
    with without_autocast(query.device):
        if backend == "pairs":
            bias_of = window_bias(grid, query.device)
            return _gate(query, average_of_pairs(key, value, weight, bias_of, valid, is_causal))
        parts = exponentials(key, value, valid)
        return gated_average(query, window_sums(parts, weight, top, query.shape[3], grid, backend), valid)


def _gate(query: Tensor, mixed: Tensor) -> Tensor:
    return (query.to(mixed.dtype).sigmoid() * mixed).to(query.dtype)


def _values_known(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting for a device, and do not become part of a graph."""
    return tensor.device.type == "cpu" and is_eager()


def _far_apart(bottom: Tensor, top: Tensor) -> bool:
    """Return whether biases are known to be too far apart for products."""
    return _values_known(top) and bool((top - bottom).max() > SPREAD)


def _check_contents(query: Tensor, key: Tensor, value: Tensor, grid: Grid, backend: str) -> None:
    """Raise unless grid, keys and values fit the queries, and the device's kernels can index all numbers."""
    check_tokens("query", query, "grid", grid)
    batch, heads, count, width = query.shape
    shared = isinstance(key, Tensor) and key.dim() == 4 and key.shape[3] == 1
    check_shape("key", key, (batch, heads, count, 1 if shared else width))
    check_shape("value", value, (batch, heads, count, width))
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected the query's {query.dtype}")
    if is_eager():
        # Sums are computed for all places of the grid, even for empty places, so count places or tokens, whichever are
        # more.
        summed = 2 * batch * heads * max(count, grid.prefix + grid.height * grid.width) * width
        pairs = query.numel() * count if backend == "reference" else max(grid.height, grid.width) ** 2
        check_tensor_size(query.device.type, max(summed, pairs), f"AFT of {count} tokens by backend {backend!r}")


def _check_bias(bias: Tensor, query: Tensor, grid: Grid) -> None:
    """Raise unless `bias` has an entry for each pair of places of the grid, for all heads or for each."""
    places = grid.prefix + grid.height * grid.width
    lead = (query.shape[1],) if isinstance(bias, Tensor) and bias.dim() == 3 else ()
    check_shape("bias", bias, (*lead, places, places))
    if is_eager():
        hint = "aft_conv or aft_simple, or smaller images"
        check_tensor_size(bias.device.type, bias.numel(), f"AFT's bias of {places} x {places} places", hint)
