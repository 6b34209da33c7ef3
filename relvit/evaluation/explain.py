"""`explain`: what each attention layer of a model computes at an image size, and which backend computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from relvit.layers import AFTSimple, LSHAttention, RelativeAttention
from relvit.layers.attention import relative_terms
from relvit.layers.patch_embed import check_divisible
from relvit.layers.timm_attention import TimmRelativeAttention
from relvit.ops import Grid, choose, num_tokens
from relvit.ops.backends.fused import augmented_width
from relvit.ops.checks import int_pair
from relvit.ops.inputs import AttentionInputs, checked

# Letters as in `rel_terms`, and one for free channels.
LETTERS = {"query": "q", "key": "k", "value": "v", "bias": "b", "channels": "c"}


class LayerPlan(NamedTuple):
    """Plan of a layer: what it does with the positions of tokens.

    Attributes:
        layer: name of the module.
        position: class of the position module, '' for none; of other mixers than attention to all, their class.
        terms: 'q', 'k', 'v' (vectors met by queries, keys, in values), 'b' (bias), 'c' (free channels).
        backend: which one computes it, '' for mixers without a choice.
        reason: why this one.
        width: of the vectors of a head, and as augmented by 'fused'.
        keeps: what is kept for backward, besides inputs and output.
        parameters: of the position module, or of an attention-free mixer.
    """

    layer: str
    position: str
    terms: str
    backend: str
    reason: str
    width: tuple[int, int]
    keeps: str
    parameters: int


@torch.no_grad()
def explain(model: nn.Module, img_size: int | Sequence[int] | None = None, training: bool = True) -> list[LayerPlan]:
    """List what each attention layer computes: position, terms, backend and the reason for it, width, what it keeps.

    Nothing is computed but tables; the choice is that of the device on which the parameters are.

    Args:
        model: a model of relvit, or of timm after `relvit.retrofit`.
        img_size: of the images, one number or (height, width) in pixels; None: that of the model.
        training: whether gradients are wanted.

    Returns:
        A plan for each layer, in the order of the model.

    Raises:
        ValueError: a size that the model does not take, or a model without such layers.
    """
    embed = getattr(model, "patch_embed", None)
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, RelativeAttention | TimmRelativeAttention | AFTSimple | LSHAttention)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layers of relvit: take a relvit_* model, or relvit.retrofit a timm model"
        )
    if embed is None:
        raise ValueError(f"{type(model).__name__} has no patch_embed, which would tell the grid of an image")
    size = embed.img_size if img_size is None else int_pair("img_size", img_size, 1)
    if not embed.dynamic_img_pad:
        check_divisible(torch.empty(1, 1, *size, device="meta"), embed.patch_size)
    grid = Grid(*embed.dynamic_feat_size(size), model.num_prefix_tokens)
    return [_plan(name, layer, grid, training) for name, layer in found.items()]


def _plan(name: str, layer: nn.Module, grid: Grid, training: bool) -> LayerPlan:
    kind = type(layer).__name__
    if isinstance(layer, AFTSimple | LSHAttention):
        own = layer if isinstance(layer, AFTSimple) else layer.position
        terms = "" if isinstance(layer, AFTSimple) else "b" * (layer.position(Grid(1, 1)).bias is not None)
        reason = f"{kind} replaces attention to all tokens"
        return LayerPlan(name, kind, terms, "", reason, (layer.head_dim,) * 2, "", _count(own))
    if getattr(layer, "block_window", None) is not None:
        grid = Grid(*layer.block_window)
    elif getattr(layer, "window", None) is not None:
        grid = grid._replace(height=min(grid.height, layer.window[0]), width=min(grid.width, layer.window[1]))
    weight, position = layer.proj.weight, layer.position
    like = {"device": weight.device, "dtype": weight.dtype}
    vectors = torch.empty(1, layer.num_heads, num_tokens(grid), layer.head_dim, **like)
    # Positions may depend on tokens, of which the width counts alone.
    terms = relative_terms(layer, torch.empty(1, num_tokens(grid), weight.shape[0], **like), grid, grid)
    given = (vectors, vectors, vectors, terms, grid)
    choice = choose(*given)
    if training:
        with torch.enable_grad():
            choice = choose(vectors.requires_grad_(), *given[1:])
    backend, reason = choice.backend, choice.reason
    if layer.backend != "auto":
        backend, reason = layer.backend, "chosen by name"
    letters = "".join(letter for field, letter in LETTERS.items() if getattr(terms, field) is not None)
    width = augmented_width(checked(AttentionInputs(*given)), padded=False) if letters else layer.head_dim
    keeps = choice.keeps if backend == choice.backend else ""
    kind = "" if position is None else type(position).__name__
    return LayerPlan(name, kind, letters, backend, reason, (layer.head_dim, width), keeps, _count(position))


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


HEADER = (
    "layers",
    "position",
    "terms",
    "backend",
    "why",
    "head width (in fused)",
    "kept for backward",
    "parameters each",
)


def as_rows(plans: Sequence[LayerPlan]) -> list[list[str]]:
    """Format plans as the cells of a table with the columns `HEADER`, layers with the same plan in one row."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for plan in plans:
        groups.setdefault(plan[1:], []).append(plan.layer)
    rows = []
    for plan, layers in groups.items():
        position, terms, backend, reason, width, keeps, parameters = plan
        names = layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]} ({len(layers)})"
        cells = (names, position, terms, backend, reason, f"{width[0]} ({width[1]})", keeps, f"{parameters:,}")
        rows.append([str(cell) or "-" for cell in cells])
    return rows


def as_table(plans: Sequence[LayerPlan]) -> str:
    """Format plans as a Markdown table, layers with the same plan in one row."""
    rows = [f"| {' | '.join(row)} |" for row in (HEADER, *as_rows(plans))]
    return "\n".join([rows[0], f"|{'---|' * len(HEADER)}", *rows[1:]])
