"""Build the cases of `gpu_check.py`: grids, masks and tables on the CPU, and results and gradients on a device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from relvit.ops import AxisTables, Grid, JointTable, RelativeTerms, key_mask, make_grid, num_tokens, relative_attention

LETTERS = ("", "k", "v", "q", "b", "kv", "qkvb")
BATCH, HEADS = 2, 2


class Scene(NamedTuple):
    """Queries, keys, values, their grids and options, on the CPU in float64; every dtype holds the numbers exactly."""

    name: str
    contents: tuple[Tensor, Tensor, Tensor]
    cotangent: Tensor
    grid: Grid
    key_grid: Grid
    distance: tuple[int, int]
    per_head: bool
    bucketing: str
    options: dict[str, Any]
    letters: tuple[str, ...]


def draw(generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    """Draw normal numbers as float64, rounded so that both bfloat16 and float16 represent them exactly."""
    exact = std * torch.randn(shape, generator=generator, dtype=torch.float64)
    return exact.bfloat16().half().double()


def draw_scene(
    name: str,
    grid: Grid,
    key_grid: Grid | None = None,
    *,
    dim: int,
    distance: tuple[int, int],
    per_head: bool = False,
    bucketing: str = "clip",
    letters: tuple[str, ...] = LETTERS,
    **options: Any,
) -> Scene:
    """Draw contents for given grids; in memory tokens come before heads, as projections leave them."""
    key_grid = grid if key_grid is None else key_grid
    generator = torch.Generator().manual_seed(0)
    lengths = [num_tokens(part) for part in (grid, key_grid, key_grid, grid)]
    *contents, cotangent = (draw(generator, BATCH, n, HEADS, dim).transpose(1, 2) for n in lengths)
    return Scene(name, tuple(contents), cotangent, grid, key_grid, distance, per_head, bucketing, options, letters)


def draw_terms(scene: Scene, letters: str, layout: type[AxisTables] | type[JointTable]) -> RelativeTerms:
    """Draw the tables of a scene, float64."""
    generator = torch.Generator().manual_seed(1)
    sizes = [2 * distance + 1 for distance in scene.distance]
    lead = (HEADS,) if scene.per_head else ()
    shapes = [tuple(sizes)] if layout is JointTable else [(size,) for size in sizes]
    vector = scene.contents[0].shape[-1:]
    terms = {
        name: layout(*(draw(generator, *lead, *shape, *tail, std=0.3) for shape in shapes))
        for name, tail in {"query": vector, "key": vector, "value": vector, "bias": ()}.items()
        if name[0] in letters
    }
    return RelativeTerms(**terms, bucketing=scene.bucketing)


def draw_scenes(quick: bool) -> Iterator[Scene]:
    """Yield all kinds of grids and masks, never square; tables end before the grids do."""
    height, width, dim, distance = (10, 7, 32, (5, 4)) if quick else (14, 10, 64, (5, 7))
    letters = ("qkvb",) if quick else LETTERS
    scene = partial(draw_scene, dim=dim, distance=distance, letters=letters)
    generator = torch.Generator().manual_seed(2)
    patches, few = height * width, height * width // 2
    sizes = torch.tensor([height, width])

    def dropped(times: int) -> Tensor:
        kept = torch.stack([torch.randperm(patches, generator=generator)[:few] for _ in range(BATCH)])
        return times * torch.stack((kept // width, kept % width), dim=-1)

    raster = make_grid(height, width, 1)
    yield scene(f"raster {height}x{width}", raster)
    yield scene("table per head", raster, per_head=True)
    yield scene("piecewise", raster, bucketing="piecewise")
    # Some kernels refuse a head_dim that is no multiple of 8.
    yield scene("head_dim 20", raster, dim=20)
    valid = torch.rand(BATCH, patches, generator=generator) < 0.7
    yield scene("padding", raster._replace(valid=valid))
    valid = torch.stack((valid[0], torch.zeros_like(valid[0])))
    yield scene("sample without valid key", make_grid(height, width, valid=valid))
    valid = torch.rand(BATCH, few, generator=generator) < 0.7
    yield scene("dropped patches", make_grid(height, width, 1, dropped(1), valid))
    # The patches are spread over so many rows and columns that augmented vectors are wider than 256. The tables grow
    # likewise: if all offsets were clipped, the gradients of tables would cancel to nothing.
    times = (256 - dim) // (height + width) + 1
    far = make_grid(times * height, times * width, 1, dropped(times), valid)
    yield scene("far apart", far, distance=(times * distance[0], times * distance[1]))
    # `make_grid` would refuse these coordinates, since some queries are outside the key grid.
    coords = (torch.rand(BATCH, few, 2, generator=generator) * (sizes + 4)).long() - 2
    valid = torch.rand(BATCH, patches, generator=generator) < 0.7
    yield scene("cross", Grid(*reversed(sizes.tolist()), 1, coords), make_grid(height, width, 2, valid=valid))
    mask = torch.rand(BATCH, 1, patches + 1, patches + 1, generator=generator) < 0.6
    yield scene("boolean mask", raster, attn_mask=mask | torch.eye(patches + 1, dtype=torch.bool))
    yield scene("causal", raster, is_causal=True)
    if not quick:
        yield scene("strip 3x200", make_grid(3, 200, 1), letters=("kv", "qkvb"))


def draw_short_scenes() -> Iterator[Scene]:
    """Yield scenes for divisions into tiles: wide and narrow grids, padding, windows, heads of several widths."""
    generator = torch.Generator().manual_seed(2)
    scene = partial(draw_scene, distance=(7, 7), letters=("kv",))
    # Kernels for all terms take a minute to compile, and every size of tiles needs other kernels.
    yield scene("raster 14x13", make_grid(14, 13, 1), dim=64, letters=("", "kv", "kvb", "b"))
    valid = torch.rand(BATCH, 9 * 32, generator=generator) < 0.7
    yield scene("padding 9x32", make_grid(9, 32, valid=valid), dim=64, letters=("kv", "b"))
    yield scene("raster 6x60, table per head", make_grid(6, 60, 1), dim=64, per_head=True)
    valid = torch.rand(BATCH, 3 * 70, generator=generator) < 0.7
    yield scene("padding 3x70", make_grid(3, 70, valid=valid), dim=32)
    yield scene("raster 6x40", make_grid(6, 40, 1), dim=80)
    yield scene("window 4x5", make_grid(4, 5), dim=64, distance=(3, 4), letters=("kv", "b"))


def moved(values: Any, device: str) -> Any:
    """Move all tensors among the values of a grid or dictionary."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def leaf(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """Copy a tensor to a leaf of the graph."""
    return tensor.detach().to(device, dtype, copy=True).requires_grad_()


def arguments_of(scene: Scene, terms: RelativeTerms, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return query, key, value, terms and both grids; tables are in single precision at least, as parameters are."""
    contents = [leaf(tensor, device, dtype) for tensor in scene.contents]
    single = torch.promote_types(dtype, torch.float32)
    pairs = (pair and type(pair)(*(leaf(table, device, single) for table in pair)) for pair in terms[:4])
    grid = moved(scene.grid, device)
    key_grid = grid if scene.key_grid is scene.grid else moved(scene.key_grid, device)
    return *contents, RelativeTerms(*pairs, bucketing=terms.bucketing), grid, key_grid


def with_gradients(out: Tensor, inputs: dict[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """Return a result and the gradient of each input, by name."""
    grads = torch.autograd.grad(out, list(inputs.values()), cotangent.to(out))
    return {"result": out.detach(), **dict(zip(inputs, grads, strict=True))}


def outcome(
    scene: Scene, terms: RelativeTerms, device: str, dtype: torch.dtype, backend: str = "auto"
) -> dict[str, Tensor]:
    """Compute the result and all gradients."""
    *arguments, grid, key_grid = arguments_of(scene, terms, device, dtype)
    out = relative_attention(*arguments, grid, key_grid, backend=backend, **moved(scene.options, device))
    if (out.dtype, out.device.type) != (dtype, device):
        raise TypeError(f"result is {out.dtype} on {out.device.type}")
    inputs = dict(zip(("query", "key", "value"), arguments[:3], strict=True))
    for name, pair in zip(RelativeTerms._fields, arguments[3][:4], strict=False):
        inputs |= {f"{name}.{part}": table for part, table in (pair._asdict() if pair else {}).items()}
    return with_gradients(out, inputs, scene.cotangent)


def stock_outcome(scene: Scene, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute stock attention to the same keys, without relative terms."""
    contents = [leaf(tensor, device, dtype) for tensor in scene.contents]
    options = moved(scene.options, device)
    valid = key_mask(moved(scene.key_grid, device))
    if valid is not None:
        # Stock attention has no result for a sample that may attend to nothing, so here such a sample may attend to
        # all.
        options["attn_mask"] = (valid | ~valid.any(dim=1, keepdim=True))[:, None, None, :]
    out = F.scaled_dot_product_attention(*contents, **options)
    return with_gradients(out, dict(zip(("query", "key", "value"), contents, strict=True)), scene.cotangent)
