"""Attention maps of a model, layer by layer, and their rollout through all layers; and the inputs of logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor, nn

from relvit.layers.attention import GridAttention
from relvit.layers.attention_weights import record_logit_inputs
from relvit.layers.mixer import lack_of
from relvit.models.depth import lack
from relvit.models.retrofit.api import can_retrofit
from relvit.models.retrofit.timm_attention import TIMM_ATTENTIONS
from relvit.ops import AttentionInputs
from relvit.ops.checks import check_kind, check_model
from relvit.utils.eagerly import eagerly
from relvit.utils.messages import an, full_name, listing, part_of

# Errors ask for images of one size, because images of native shapes, in a dictionary, have no common grid of patches.
ONE_SIZE = "a tensor (B, in_chans, height, width), images of one size"


class AttentionMaps(NamedTuple):
    """The attention weights of a model for some images.

    Attributes:
        weights: one tensor per layer, float32: (B, heads, N, N) from `attention_maps`, (heads, N, N) from
            `relvit.app.evaluation.Predictor.attention`. Rows are queries, columns are keys, and rows sum to 1. The
            `prefix` tokens come first, then the patches, row by row.
        grid: numbers of rows and columns of patches. `weights[-1][..., 0, prefix:].unflatten(-1, grid)` shows the last
            layer's weights of the first token on all patches, as one map per head.
        prefix: number of tokens that are not patches: class token, registers.
    """

    weights: list[Tensor]
    grid: tuple[int, int]
    prefix: int


def attention_maps(model: nn.Module, images: Tensor, layers: Sequence[int] | None = None) -> AttentionMaps:
    """Compute the attention weights of a Vision Transformer, which fused attention never forms.

    The weights of each layer take N x N numbers per head and image. The model is not changed. If a block runs several
    times, as in `relvit_universal_*`, the result holds the weights of its last run. Blocks that share one attention
    each have the weights of their own run. timm's `AttentionExtract` needs `method='hook'` for these models.

    Examples:
        >>> model = timm.create_model("relvit_tiny", img_size=64, depth=2).eval()
        >>> maps = attention_maps(model, torch.randn(1, 3, 64, 96))
        >>> len(maps.weights), maps.weights[-1].shape, maps.grid
        (2, torch.Size([1, 3, 24, 24]), (4, 6))

    Args:
        model: a model in evaluation mode: a relvit model with attention, a retrofitted model, or a model of timm whose
            blocks have timm's `Attention`, `AttentionRope` or `EvaAttention`.
        images: (B, in_chans, height, width), normalised for the model.
        layers: indices of the blocks; negative indices count from the last block. None: all blocks.

    Raises:
        TypeError: `model` is not a module, has no attention, or has another kind of attention.
        ValueError: the model is in training mode, or computes windows or parts of images; an index has no block; the
            images have another shape.
    """
    weights = _record_weights(model, images, layers, Tensor.float)
    return AttentionMaps(weights, patch_grid(model, images.shape[-2:]), model.num_prefix_tokens)


@torch.no_grad()
def _record_weights(
    model: nn.Module, images: Tensor, layers: Sequence[int] | None, keep: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply `keep` to the weights of each layer; see `attention_maps`."""
    attentions = _attentions(model)
    if model.training:
        raise ValueError("attention_maps needs a model in evaluation mode: call model.eval()")
    depth = len(attentions)
    if layers is not None:
        check_kind("layers", layers, Iterable, "a list of indices of blocks, such as [-1]")
    chosen = list(range(depth)) if layers is None else list(layers)
    if wrong := [index for index in chosen if not -depth <= index < depth]:
        raise ValueError(f"layers holds {wrong[0]}, the model has {depth} blocks: give numbers from 0 to {depth - 1}")
    if (recurrence := getattr(model, "recurrence", None)) is not None and (why := recurrence.lacks.get("weights")):
        raise ValueError(why)
    if any(getattr(attentions[index], "window", None) for index in chosen):
        raise ValueError(
            "attention within windows has no N x N weights: call relvit.models.set_reach(model, 'trained') first"
        )
    if any(getattr(attentions[index], "block_window", None) for index in chosen):
        whole = [index for index, attention in enumerate(attentions) if not getattr(attention, "block_window", None)]
        cure = f"attention_maps takes layers={whole}, which are without windows"
        cure = cure if whole else "all blocks of this model have windows"
        raise ValueError(f"blocks of {type(model).__name__} with windows have no N x N weights: {cure}")
    check_kind("images", images, Tensor, ONE_SIZE)
    if images.dim() != 4:
        raise ValueError(f"images must be (B, in_chans, height, width), got shape {tuple(images.shape)}")
    with eagerly(), _recording([attentions[i] for i in chosen], attentions, keep) as recorded:
        _run(model, images)
    found = []
    for index in (index % depth for index in chosen):
        # The last runs of a shared attention are the runs of the blocks that share it, in this order.
        later, runs = attentions[index + 1 :].count(attentions[index]), recorded[attentions[index]]
        if len(runs) <= later:
            kind = full_name(type(attentions[index]))
            raise TypeError(
                f"the forward of blocks.{index}.attn, {an(kind)}, shows no weights: leave the block out of layers"
            )
        found.append(runs[-1 - later])
    return found


def patch_grid(model: nn.Module, img_size: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of patches of images of this size.

    Examples:
        >>> patch_grid(timm.create_model("relvit_tiny", img_size=64, depth=1), (64, 96))
        (4, 6)

    Args:
        model: a model of relvit or timm with a patch embedding.
        img_size: (height, width) in pixels.
    """
    embed = model.patch_embed if hasattr(model, "patch_embed") else model.embeds
    rows, columns = map(int, embed.dynamic_feat_size(tuple(img_size)))
    return rows, columns


@torch.no_grad()
def logit_inputs(model: nn.Module, images: Tensor) -> dict[str, AttentionInputs]:
    """Run a model once, and return the inputs from which each attention layer computes its logits.

    Examples:
        >>> model = timm.create_model("relvit_tiny", img_size=64, depth=1).eval()
        >>> inputs = logit_inputs(model, torch.randn(1, 3, 64, 96))["blocks.0.attn"]
        >>> inputs.query.shape, inputs.terms.key.rows.shape, inputs.grid.height, inputs.grid.width
        (torch.Size([1, 3, 24, 64]), torch.Size([15, 64]), 4, 6)

    Args:
        model: a model in evaluation mode: a relvit model with attention, or a model that `relvit.retrofit` has changed.
        images: (B, in_chans, height, width), normalised for the model.

    Returns:
        A dictionary from the name of each layer to the arguments that the layer passes to
        `relvit.ops.relative_attention`: queries, keys and values (B, heads, N, head_dim), terms, grid and options. If a
        block runs several times, these are the arguments of its last run.

    Raises:
        TypeError: `model` is not a module, or has no attention with relative positions.
        ValueError: the model is in training mode, computes windows or parts of images, or has a layer that does not
            compute all pairs of patches.
    """
    check_model(model)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, GridAttention)}
    name = type(model).__name__
    if not layers:
        raise TypeError(f"{name} has no attention with relative positions: change the model by relvit.retrofit first")
    if model.training:
        raise ValueError("logit_inputs needs a model in evaluation mode: call model.eval()")
    if (recurrence := getattr(model, "recurrence", None)) or any(layer.window for layer in layers.values()):
        cure = recurrence.undo if recurrence else "set_reach(model, 'trained')"
        raise ValueError(f"attention within windows or parts has no logits of all pairs: call {cure} first")
    check_kind("images", images, Tensor, ONE_SIZE)
    with eagerly(), record_logit_inputs() as record:
        _run(model, images)
    found = {}
    rows, columns = patch_grid(model, images.shape[-2:])
    for layer_name, layer in layers.items():
        given = record.get(layer.attn_drop)
        if (
            given is None
            or not given.key.shape[2] == given.query.shape[2] == rows * columns + given.grid.prefix
            # A window may have as many tokens as the image, but other numbers of rows and columns, so compare rows and
            # columns, too.
            or (given.grid.height, given.grid.width) != (rows, columns)
        ):
            raise ValueError(
                f"{layer_name} of {name} computes windows, pooled tokens or some of the patches, and logit_inputs "
                "needs the logits of all pairs of patches: take another model"
            )
        found[layer_name] = given
    return found


def attention_rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Compute attention rollout, (B, N, N): the share of each input token (columns) in each output token (rows).

    The rollout is the product over the layers of (W + I) / 2, where W is the mean over heads of a layer's attention
    weights, and I is the identity matrix, for the residual connection; rows sum to 1. Source: Abnar & Zuidema 2020
    (arXiv 2005.00928), section 3, eq. 1.

    Examples:
        >>> model = timm.create_model("relvit_tiny", img_size=64, depth=2).eval()
        >>> attention_rollout(model, torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 24, 24])

    Args: see `attention_maps`.

    Raises:
        TypeError, ValueError: see `attention_maps`. ValueError also for a model whose blocks do not run one after the
            other.
    """
    if why := lack(model, "rollout"):
        raise ValueError(f"there is no attention rollout of {type(model).__name__}: {why}")
    rollout: Tensor | None = None
    for mean in _record_weights(model, images, None, lambda weights: weights.float().mean(dim=1)):
        layer = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2
        rollout = layer if rollout is None else layer @ rollout
    assert rollout is not None
    return rollout


def _attentions(model: nn.Module) -> list[nn.Module]:
    """Return the attention of each block."""
    check_model(model)
    blocks = list(getattr(model, "blocks", ()))
    if not blocks:
        inner = [(name, part) for name, part in model.named_modules() if getattr(part, "blocks", None)]
        # A stage of Swin or MViT has `blocks`, too, but no embedding of images, so do not suggest it.
        parts = [part_of(name) for name, part in inner if hasattr(part, "forward_features")]
        where = ", as its blocks stand in stages, which attend within windows or with fewer tokens" if inner else ""
        raise _unknown(model, f"it has no `blocks`{f', {parts[0]} has: give this part' if parts else where}")
    for index, block in enumerate(blocks):
        attention = getattr(block, "attn", None)
        if hasattr(attention, "lacks") and (why := lack_of(attention, "weights")):
            raise TypeError(f"{type(model).__name__} has no attention weights: {why}")
        if attention is None:
            raise _unknown(model, f"blocks.{index} is {an(full_name(type(block)))}, without attention of the name attn")
        if not isinstance(attention, GridAttention) and type(attention) not in TIMM_ATTENTIONS:
            cure = ": call relvit.retrofit(model) first" if can_retrofit(model) else ""
            raise _unknown(model, f"blocks.{index}.attn is {an(full_name(type(attention)))}{cure}")
    return [block.attn for block in blocks]


def _run(model: nn.Module, images: Tensor) -> None:
    """Compute the tokens of images; the encoders of `transformers` and `segment_anything` have no head to leave out."""
    getattr(model, "forward_features", model)(images)


def _unknown(model: nn.Module, why: str) -> TypeError:
    timms = listing([full_name(cls) for cls in TIMM_ATTENTIONS])
    return TypeError(
        f"attention_maps does not know the attention of {type(model).__name__}: {why}; it takes models with `blocks`: "
        f"relvit's, those that relvit.retrofit has changed, and timm's with {timms}"
    )


@contextmanager
def _recording(
    chosen: Sequence[nn.Module], attentions: Sequence[nn.Module], keep: Callable[[Tensor], Tensor]
) -> Iterator[dict[nn.Module, deque[Tensor]]]:
    """Record the weights that the chosen layers pass to their `attn_drop`, in as many runs as blocks have a layer."""
    recorded = {layer: deque[Tensor](maxlen=attentions.count(layer)) for layer in chosen}
    caller = get_ident()

    def record(attention: nn.Module, _module: nn.Module, given: tuple[Tensor]) -> None:
        # Ignore calls by other threads, which may run the model on other images meanwhile.
        if get_ident() == caller:
            recorded[attention].append(keep(given[0]))

    handles = [layer.attn_drop.register_forward_pre_hook(partial(record, layer)) for layer in recorded]
    # Switch off fused attention in timm's layers, because only then do they pass weights to `attn_drop`. relvit's
    # layers pass weights whenever `attn_drop` has hooks. `eagerly` keeps other threads from doing the same meanwhile.
    unfused = [layer for layer in recorded if not isinstance(layer, GridAttention) and layer.fused_attn]
    for layer in unfused:
        layer.fused_attn = False
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
        for layer in unfused:
            layer.fused_attn = True
