"""Cases of attention-free operations and layers (AFT) for `gpu_check.py`, which compares them with the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_scenes import BATCH, HEADS, leaf, with_gradients
from torch import Tensor, nn

from relvit.families.aft import AFTConv2d, AFTFull, aft_conv, aft_full, aft_simple, reference
from relvit.families.aft.operations import FULL_BACKENDS, WINDOW_FORMS
from relvit.ops import Grid, make_grid, num_tokens

WIDTH = 6
# Exponentials and sums are in float32 or wider, but on GPUs products are in bfloat16. Otherwise half precision rounds
# the inputs and the result alone.
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def contents(grid: Grid, spread: float) -> dict[str, Tensor]:
    """Draw queries, keys of standard deviation `spread`, values, a window and a bias, on the CPU in float64."""
    generator = torch.Generator().manual_seed(0)
    tokens = num_tokens(grid)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "query": draw(BATCH, HEADS, tokens, WIDTH),
        "key": spread * draw(BATCH, HEADS, tokens, WIDTH),
        "value": draw(BATCH, HEADS, tokens, WIDTH),
        "window": draw(HEADS, 5, 3),
        "bias": draw(tokens, tokens),
    }


def outcome(
    operation: Callable[..., Tensor], drawn: dict[str, Tensor], names: tuple[str, ...], device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Compute the result and the gradients of all inputs."""
    inputs = {name: leaf(drawn[name], device, dtype) for name in names}
    result = operation(*inputs.values())
    upstream = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    return with_gradients(result, inputs, upstream)


def operations(grid: Grid) -> Iterator[tuple[str, tuple[str, ...], Callable[..., Tensor], Callable[..., Tensor]]]:
    """Yield the name, the inputs, the operation and its reference."""
    first = ("query", "key", "value")
    for backend in (*WINDOW_FORMS, "pairs", "auto"):
        fast = partial(aft_conv, grid=grid, backend=backend)
        yield f"aft_conv, {backend}", (*first, "window"), fast, partial(reference.aft_conv, grid=grid)
    for backend in (*FULL_BACKENDS[:2], "auto"):
        fast = partial(aft_full, grid=grid, backend=backend)
        yield f"aft_full, {backend}", (*first, "bias"), fast, partial(reference.aft_full, grid=grid)
    for causal in (False, True):
        options = {"grid": grid, "is_causal": causal}
        name = f"aft_simple, {'causal' if causal else 'auto'}"
        yield name, first, partial(aft_simple, **options), partial(reference.aft_simple, **options)


def layers() -> Iterator[tuple[str, nn.Module, Grid]]:
    """Yield the name of a layer, the layer with random parameters, and a grid."""
    for name, made in (("AFTConv2d", partial(AFTConv2d, kernel_size=5)), ("AFTFull", partial(AFTFull, grid_size=6))):
        torch.manual_seed(0)
        layer = made(48, HEADS)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        yield name, layer, make_grid(6, 6)


def compiled_outcome(layer: nn.Module, grid: Grid, device: str, compiled: bool) -> dict[str, Any]:
    """Compute the result and the gradients of a layer, compiled or not."""
    layer = layer.to(device)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(BATCH, 36, 48, generator=torch.Generator().manual_seed(1)).to(device)
    out = run(x, grid)
    return with_gradients(out, dict(layer.named_parameters()), 2 * out.detach())
