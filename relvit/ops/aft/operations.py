"""The public operations of attention-free transformers: what is checked, and which way computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from relvit.ops import reference
from relvit.ops.aft.checks import check_contents, check_pairs, check_weight
from relvit.ops.aft.difference import LEAST_DIFFERENCE, difference
from relvit.ops.aft.exponentials import (
    SPREAD,
    Sums,
    bounded_exp,
    exponentials,
    for_products,
    from_raster,
    pad_window,
    to_raster,
)
from relvit.ops.aft.gate import gated, gated_average
from relvit.ops.aft.pairs import average_of_pairs, average_so_far
from relvit.ops.aft.window import convolution, toeplitz
from relvit.ops.checks import check_backend, int_pair
from relvit.ops.grid import Grid, key_mask, patch_coords
from relvit.ops.tracing import is_compiling, is_functorch, without_autocast

PLACES_FOR_PRODUCTS = 256
SIMPLE_BACKENDS = ("reference",)
FULL_BACKENDS = ("products", "pairs", "reference")
WINDOWS: dict[str, Callable[[Tensor, Tensor, Sums, int, int], Sums]] = {
    "toeplitz": toeplitz,
    "convolution": convolution,
    "difference": difference,
}
CONV_BACKENDS = (*WINDOWS, "pairs", "reference")


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
    """AFT-full: an average of all values, weighted in each channel by its keys and a learned bias for each pair.

        out_i = sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)

    with all products by element. Source: Zhai et al. 2021 (arXiv 2105.14103), eq. 2.

    Args:
        query: (B, heads, N, head_dim), any floating dtype; the paper has one head.
        key: (B, heads, N, head_dim), or (B, heads, N, 1) where a head's channels share it; same dtype, any size of
            numbers.
        value: (B, heads, N, head_dim), same dtype.
        bias: w, (T, T) or (heads, T, T), any floating dtype, for the T = prefix + H W places of the grid, queries
            first, prefix tokens before the raster. Tokens with coordinates look up the entries of their places.
        grid: where the tokens lie; padding (`valid`) adds nothing, whatever it holds.
        is_causal: leave out keys that come later in the sequence than the query; by pairs.
        backend: 'products' (exp(w) times exp(k) v and exp(k), one product with a matrix each; where one query's biases
            are more than 70 apart, those further below the largest count as 70 below it), 'pairs' (a softmax for each
            query and channel, exact for any bias: O(N^2 dim) exponentials), 'reference' (the same in double precision
            and O(N^2 dim) memory), or 'auto': products where they are exact, which on the CPU is looked up and
            elsewhere, and in graphs, taken for granted.

    Returns:
        (B, heads, N, head_dim), dtype of the query; exponentials and sums are in float32 at least, but for products in
        bfloat16 on GPUs. A sample in which no token is valid gets zeros.

    Raises:
        ValueError: shapes, dtypes or names that do not fit.
        TypeError: arguments that are not of the kind asked for.
    """
    check_backend(backend, FULL_BACKENDS)
    check_contents(query, key, value, grid)
    check_pairs(bias, query, grid)
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
            place = _places(grid, query.device)
            mixed = average_of_pairs(
                key,
                value,
                bias,
                lambda bias, first, last: bias[:, place[:, first:last, None], place[:, None, :]].transpose(0, 1),
                valid,
                is_causal,
            )
        else:
            parts = to_raster(for_products(exponentials(key, value, valid), query.dtype), grid)
            weights = bounded_exp(bias - top).to(parts.numerator.dtype)
            return gated_average(query, from_raster(products(weights, parts), grid), valid)
    return gated(query, mixed)


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
    """AFT-local: `aft_full` whose bias is zero, not absent, between places that are far apart.

    Every token still sees all others. Source: Zhai et al. 2021 (arXiv 2105.14103), eq. 3, by rows and columns.

    Args:
        query, key, value, bias, grid, is_causal, backend: see `aft_full`.
        window: the bias is kept where rows and columns are both less than this apart: one number or (rows, columns).
            Prefix tokens, which have no place, are near to all, but for a window of 0: that leaves `aft_simple`.

    Returns, raises: as `aft_full`.
    """
    rows, cols = int_pair("window", window, 0)
    if not isinstance(grid, Grid):
        check_contents(query, key, value, grid)
    check_pairs(bias, query, grid)
    near = [_near(size, reach, bias.device) for size, reach in ((grid.height, rows), (grid.width, cols))]
    mask = (near[0][:, None, :, None] & near[1][None, :, None, :]).flatten(2).flatten(0, 1)
    mask = F.pad(mask, (grid.prefix, 0, grid.prefix, 0), value=min(rows, cols) > 0)
    return aft_full(query, key, value, torch.where(mask, bias, 0.0), grid, is_causal=is_causal, backend=backend)


def aft_simple(
    query: Tensor, key: Tensor, value: Tensor, grid: Grid, *, is_causal: bool = False, backend: str = "auto"
) -> Tensor:
    """AFT-simple: `aft_full` without a bias. All tokens share one average, which each takes its gates' share of.

        out_i = sigmoid(q_i) * sum_j softmax_j(k_j) v_j

    Source: Zhai et al. 2021 (arXiv 2105.14103), section 3.2.

    Args:
        query, key, value, grid: see `aft_full`.
        is_causal: leave out keys that come later in the sequence than the query: an average of its own for each.
        backend: 'auto' or 'reference'.

    Returns, raises: as `aft_full`.
    """
    check_backend(backend, SIMPLE_BACKENDS)
    check_contents(query, key, value, grid)
    if backend == "reference":
        return reference.aft_simple(query, key, value, grid, is_causal=is_causal)
    valid = key_mask(grid)
    with without_autocast(query.device):
        if is_causal:
            mixed = average_so_far(key, value, valid)
        else:
            parts = exponentials(key, value, valid)
            return gated_average(query, Sums(*(part.sum(dim=2, keepdim=True) for part in parts)), valid)
    return gated(query, mixed)


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
    """AFT-conv: `aft_full` whose bias depends on the offset from query to key alone, and is zero outside of a window.

    Every token sees all others; the bias of those near it makes the difference. Source: Zhai et al. 2021 (arXiv
    2105.14103), eq. 4 and section 3.2, in two dimensions; a sequence is a grid of one row.

    Args:
        query: (B, heads, N, head_dim), any floating dtype.
        key: (B, heads, N, 1), as the paper has it, or (B, heads, N, head_dim); same dtype, any size of numbers.
        value: (B, heads, N, head_dim), same dtype.
        weight: w, (heads, r, c), any floating dtype: entry [r // 2 + dy, c // 2 + dx] is for a key dy rows below and dx
            columns right of the query; r and c are odd. To, from and between prefix tokens w is 0.
        grid: where the tokens lie; padding (`valid`) adds nothing, whatever it holds.
        is_causal: leave out keys that come later in the sequence than the query; by pairs.
        backend: 'toeplitz' (products with the matrices of all pairs of a head, or of the rows in the window),
            'convolution' (depthwise; any size in one graph), 'difference' (depthwise as in the paper, exact for weights
            from -5 on; gradients for large windows by Fourier transforms where these are exact), 'pairs' (a softmax for
            each query and channel, exact for any weights: O(N^2 dim) exponentials), 'reference' (the same in double
            precision and O(N^2 dim) memory), or 'auto' (what was the fastest and is exact, see `tools/benchmark.py
            --level aft`). To the first three, weights more than 70 below the largest, or below the 0 outside, count as
            70 below it; 'auto' takes pairs for them on the CPU, where it looks.

    Returns, raises: as `aft_full`.
    """
    check_backend(backend, CONV_BACKENDS)
    check_contents(query, key, value, grid)
    check_weight(weight, query)
    if backend == "reference":
        return reference.aft_conv(query, key, value, weight, grid, is_causal=is_causal)
    if is_causal and backend in WINDOWS:
        raise ValueError(f"backend {backend!r} has no causal form: use 'auto' or 'pairs'")
    weight, bottom, top = _within(weight.to(torch.promote_types(weight.dtype, torch.float32)), grid)
    if backend == "auto":
        backend = "pairs" if is_causal or _far_apart(bottom, top) else choose_window(bottom, grid)
    valid = key_mask(grid)
    with without_autocast(query.device):
        if backend == "pairs":
            mixed = average_of_pairs(key, value, weight, _window_bias(weight, grid), valid, is_causal)
        else:
            parts = to_raster(for_products(exponentials(key, value, valid), query.dtype), grid)
            patches = Sums(*(part[:, :, grid.prefix :] for part in parts))
            sums = WINDOWS[backend](weight, top, patches, grid.height, grid.width)
            if grid.prefix:
                outside = bounded_exp(-top)
                sums = Sums(*(_with_prefix(*pair, outside, grid.prefix) for pair in zip(sums, parts, strict=True)))
            return gated_average(query, from_raster(sums, grid), valid)
    return gated(query, mixed)


def choose_window(bottom: Tensor, grid: Grid) -> str:
    """Which of `WINDOWS` `aft_conv` takes for 'auto': what took the least time in `tools/benchmark.py --level aft`.

    On two CPU cores `difference` did, at 14 x 14 places and at 64 x 64; `convolution` took a tenth more. Weights are
    looked at there alone. Elsewhere products are taken for small grids; nothing is known of GPUs.
    """
    places = grid.height * grid.width
    if torch.jit.is_tracing() or (is_compiling() and not has_static_value(places)):
        return "convolution"
    if bottom.device.type == "cpu" and not is_compiling():
        return "difference" if not is_functorch() and bottom.min() >= LEAST_DIFFERENCE else "convolution"
    return "toeplitz" if places <= PLACES_FOR_PRODUCTS else "convolution"


def products(weights: Tensor, parts: Sums) -> Sums:
    """sum_j weights_ij parts_j, weights (1 or heads, T, T), parts (B, heads, T, c) each."""
    widths = [part.shape[3] for part in parts]
    if weights.shape[0] == 1:
        # Heads beside channels, as the tokens lie in memory already.
        shapes = [(part.shape[1], width) for part, width in zip(parts, widths, strict=True)]
        x = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)
        sums = torch.matmul(weights, x).split([heads * width for heads, width in shapes], dim=-1)
        return Sums(*(part.unflatten(-1, shape).transpose(1, 2) for part, shape in zip(sums, shapes, strict=True)))
    x = torch.cat([part.permute(1, 2, 0, 3) for part in parts], dim=-1)
    sums = torch.bmm(weights, x.flatten(2)).view(x.shape).split(widths, dim=-1)
    return Sums(*(part.permute(2, 0, 1, 3) for part in sums))


def _with_prefix(sums: Tensor, parts: Tensor, outside: Tensor, prefix: int) -> Tensor:
    """Sums of the patches (B, heads, H W, c) with what prefix tokens, of weight `outside`, add, and theirs before."""
    everything = parts.sum(dim=2, keepdim=True).expand(-1, -1, prefix, -1)
    first = parts[:, :, :prefix].sum(dim=2, keepdim=True)
    return torch.cat((everything, sums + outside.to(parts.dtype) * first), dim=2)


def _within(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """The part of the window that two places of the raster can be apart, its smallest and its largest w, (heads, 1, 1).

    The w = 0 of all that is outside of the window is one of them, if there is anything outside.
    """
    covers = False
    if not is_compiling():
        reach = [min(size // 2, extent - 1) for size, extent in zip(weight.shape[1:], grid[:2], strict=True)]
        weight = pad_window(weight, *reach)
        covers = reach == [grid.height - 1, grid.width - 1] and grid.prefix == 0
    bottom, top = (extreme(weight.detach(), dim=(1, 2), keepdim=True) for extreme in (torch.amin, torch.amax))
    return (weight, bottom, top) if covers else (weight, bottom.clamp_max(0), top.clamp_min(0))


def _far_apart(bottom: Tensor, top: Tensor) -> bool:
    """Whether biases lie too far apart for products; only where that is known without waiting."""
    if top.device.type != "cpu" or is_compiling() or is_functorch():
        return False
    return bool((top - bottom).max() > SPREAD)


def _window_bias(weight: Tensor, grid: Grid) -> Callable[[Tensor, int, int], Tensor]:
    """w of some queries with all tokens, (1 or B, heads, queries, N), from windows such as `weight`."""
    coords = patch_coords(grid, weight.device)
    coords = coords if coords.dim() == 3 else coords[None]
    coords = F.pad(coords, (0, 0, grid.prefix, 0))
    placed = torch.arange(coords.shape[1], device=weight.device) >= grid.prefix

    def bias_of(weight: Tensor, first: int, last: int) -> Tensor:
        near, index = placed[first:last, None] & placed, []
        for axis, size in enumerate(weight.shape[1:]):
            offset = coords[:, None, :, axis] - coords[:, first:last, None, axis]
            near = near & (offset.abs() <= size // 2)
            index.append(offset.clamp(-(size // 2), size // 2) + size // 2)
        return torch.where(near, weight[:, index[0], index[1]], 0.0).transpose(0, 1)

    return bias_of


def _places(grid: Grid, device: torch.device) -> Tensor:
    """The number of each token's place, prefix tokens first, then the raster: (1 or B, N)."""
    coords = patch_coords(grid, device)
    patches = grid.prefix + coords[..., 0] * grid.width + coords[..., 1]
    patches = patches if patches.dim() == 2 else patches[None]
    prefix = torch.arange(grid.prefix, device=device).expand(patches.shape[0], -1)
    return torch.cat((prefix, patches), dim=1)


def _near(size: int, reach: int, device: torch.device) -> Tensor:
    """Whether two places of a line are less than `reach` apart, (size, size)."""
    places = torch.arange(size, device=device)
    return (places[:, None] - places).abs() < reach
