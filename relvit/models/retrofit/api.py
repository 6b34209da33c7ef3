"""`relvit.retrofit`: check a timm model, then exchange its classes for those of relvit's layers and of `models`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from timm.layers import DiffAttention, HybridEmbed, PatchEmbed
from timm.models.beit import Block as BeitBlock
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.vision_transformer import (
    Block,
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock
from timm.models.vision_transformer_sam import Block as SamBlock
from torch import nn

from relvit.layers import AnySizePatchEmbed
from relvit.layers.positions.factory import make_position, position_factory
from relvit.layers.timm_attention import TIMM_ATTENTIONS
from relvit.layers.timm_relpos import OWN_ATTENTIONS
from relvit.models.relative_vit import RelVisionTransformer
from relvit.models.retrofit.beit_sam_swin import forget_own_positions, import_positions
from relvit.models.retrofit.models import IMPORTED, RETROFITTED, Retrofitted, RetrofittedNaFlexVit
from relvit.ops.attention import BACKENDS
from relvit.ops.checks import check_backend, int_pair
from relvit.utils.messages import check_choice, listing

ABS_POS = ("keep", "freeze", "drop")
ABSOLUTE_EMBEDDINGS = ("pos_embed", "embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x")
MAX_GRID = 64
# The name by which timm creates retrofitted models.
RETROFITTED_NAME = "retrofitted"
# Blocks that hand `attn_mask` and `rope` on to one attention untouched.
BLOCKS = (Block, ResPostBlock, EvaBlock, EvaBlockPostNorm)
# Blocks of models that bring relative positions: these hand on a shared bias, or nothing.
OWN_BLOCKS = (RelPosBlock, ResPostRelPosBlock, BeitBlock, SamBlock, SwinTransformerBlock, SwinTransformerV2Block)
PATCH_EMBEDS = (PatchEmbed, AnySizePatchEmbed, HybridEmbed)
REFUSED: dict[type[nn.Module], str] = {
    ParallelScalingBlock: "its attention and its MLP share projections, so there is no attention module to retrofit",
    ParallelThingsBlock: "it holds several attention modules side by side",
    DiffParallelScalingBlock: "its attention is the difference of two softmaxes",
    DiffAttention: "it is the difference of two softmaxes",
}


def retrofit(
    model: nn.Module,
    rel_terms: str = "kv",
    *,
    max_distance: int | Sequence[int] = 7,
    shared_heads: bool = True,
    layout: str = "separate",
    bucketing: str = "clip",
    init_std: float = 0.0,
    position: str | Callable[..., nn.Module] | None = None,
    abs_pos: str = "keep",
    backend: str = "auto",
    max_grid: int | Sequence[int] | None = None,
) -> nn.Module:
    """Give a timm Vision Transformer relative positions in 2D, in place; by default its outputs stay as they are.

    Every attention module gets tables as in `RelativePosition2d` (state dict keys `blocks.N.attn.position.*`; all other
    keys stay) and computes `relvit.ops.relative_attention`. Tables meet queries and keys after their norms and before
    their rotation, if there is any. The model then takes images of every size whose sides are multiples of the patch:
    absolute embeddings are interpolated as in timm, rotary ones computed for the size. Features, checkpointing, layer
    decay, pruning, `set_input_size` and `reset_classifier` of timm work as before.

    Models that bring relative positions of their own keep them, in relvit's modules: outputs stay the same at the size
    that they were trained for, and at other sizes offsets beyond a table use its edge. Of the arguments, `abs_pos` and
    `backend` are for these models, too.

    Args:
        model: timm's `VisionTransformer`, `VisionTransformerDistilled`, `Eva` or `NaFlexVit`; with relative positions
            `VisionTransformerRelPos`, `Beit`, `VisionTransformerSAM`, `SwinTransformer` or `SwinTransformerV2`. It is
            changed.
        rel_terms: relative terms by letter: 'q', 'k', 'v' (vectors on queries, keys, values), 'b' (bias). This and the
            next five: see `RelativePosition2d`.
        max_distance: clip distance in patches, one for both axes or (rows, columns).
        shared_heads: one set of tables for all heads of a block, or one per head.
        layout: a table per axis ('separate') or one over both ('joint').
        bucketing: which row of a table an offset uses: 'clip' or iRPE's 'piecewise'.
        init_std: standard deviation that initialises what a position learns; with 0 the outputs stay the same.
        position: instead of these tables, one of the names that `RelVisionTransformer` has (slopes change the outputs
            at once), or a class of your own, called as `position(head_dim, num_heads, device=, dtype=)` for each block.
        abs_pos: the absolute embedding: 'keep', 'freeze' (train it no further) or 'drop' (remove it).
        backend: see `relvit.ops.relative_attention`.
        max_grid: for `NaFlexVit`, the most rows and columns of patches of an image in a NaFlex batch, one for both or
            (rows, columns); None: 64. Images given as tensors may be larger.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is no module, or `position` makes none.
        ValueError: a model that cannot be retrofitted, with the reason and the name of the module at fault, or an
            argument out of range. The model is not changed then.
    """
    tables = {
        "rel_terms": rel_terms,
        "max_distance": max_distance,
        "shared_heads": shared_heads,
        "layout": layout,
        "bucketing": bucketing,
        "init_std": init_std,
    }
    chosen = tables | {"position": position, "abs_pos": abs_pos, "backend": backend, "max_grid": max_grid}
    _check_model(model)
    check_choice("abs_pos", abs_pos, ABS_POS)
    check_backend(backend, tuple(BACKENDS))
    becomes = (RETROFITTED | IMPORTED)[type(model)]
    if max_grid is not None and becomes is not RetrofittedNaFlexVit:
        raise ValueError(f"max_grid is for NaFlexVit, got {max_grid!r} for {type(model).__name__}")
    max_grid = int_pair("max_grid", MAX_GRID if max_grid is None else max_grid, 1)
    absolute = [name for name, _ in model.named_parameters() if name in ABSOLUTE_EMBEDDINGS]
    if abs_pos != "keep" and not absolute:
        raise ValueError(f"abs_pos={abs_pos!r}: this {type(model).__name__} has no absolute embedding, leave 'keep'")
    layers: Mapping[str, Mapping[str, nn.Module]]
    if type(model) in IMPORTED:
        _check_defaults(model, {**tables, "position": position})
        layers = import_positions(model)
    else:
        factory = position_factory("tables" if position is None else position, retrofit, **tables)
        blocks = named_blocks(model).items()
        layers = {f"{name}.attn": {"position": make_position(factory, block.attn)} for name, block in blocks}

    # From here on nothing can fail.
    for name, modules in layers.items():
        attn = model.get_submodule(name)
        attn.__class__ = (TIMM_ATTENTIONS | OWN_ATTENTIONS)[type(attn)]
        if type(model) in IMPORTED:
            forget_own_positions(attn)
        for part, module in modules.items():
            setattr(attn, part, module.train(attn.training))
        attn.backend = backend
    model.__class__ = becomes
    model.open_to_all_sizes()
    if becomes is RetrofittedNaFlexVit:
        model.max_grid = max_grid
    for name in absolute if abs_pos != "keep" else ():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if abs_pos == "freeze":
            getattr(module, leaf).requires_grad_(False)
        else:
            setattr(module, leaf, None)
            if becomes is RetrofittedNaFlexVit:
                module.pos_embed_type = "none"
    _describe(model, chosen)
    return model


def retrofit_arguments() -> tuple[str, ...]:
    """Return the names of the arguments of `retrofit`, as in a configuration, where a position is given by its name."""
    return tuple(name for name in inspect.signature(retrofit).parameters if name != "model")


def _describe(model: nn.Module, chosen: dict[str, Any]) -> None:
    """Have timm's `save_for_hf` describe a model that `timm.create_model` made as one of the name `RETROFITTED_NAME`.

    See `relvit.models.retrofit.registered`.
    """
    if not hasattr(model, "_model_args"):
        return
    cfg, defaults = model.pretrained_cfg, inspect.signature(retrofit).parameters
    given = {name: value for name, value in chosen.items() if value != defaults[name].default}
    model._model_args = {**model._model_args, "model": cfg["architecture"], "retrofit": given}
    # timm has the description under both names.
    model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": RETROFITTED_NAME}


def _check_model(model: nn.Module) -> None:
    """Raise unless every part of the model can be retrofitted."""
    if not isinstance(model, nn.Module):
        hint = ": create the model first, with timm.create_model" if isinstance(model, str) else ""
        raise TypeError(f"model must be a timm model, got {model!r} of type {type(model).__name__}{hint}")
    if type(model) not in RETROFITTED | IMPORTED:
        raise ValueError(f"{type(model).__name__} cannot be retrofitted: {_why_not(model)}")
    blocks, attentions = (OWN_BLOCKS, OWN_ATTENTIONS) if type(model) in IMPORTED else (BLOCKS, TIMM_ATTENTIONS)
    for name, block in named_blocks(model).items():
        _check_part(name, block, blocks)
        _check_part(f"{name}.attn", block.attn, tuple(attentions))
    embed = getattr(model, "patch_embed", None)
    # With dynamic sizes timm itself has made sure that patches come as a grid.
    if embed is not None and not getattr(model, "dynamic_img_size", False):
        _check_part("patch_embed", embed, PATCH_EMBEDS)


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return all blocks of a model by name, those of Swin stage by stage."""
    if not hasattr(model, "layers"):
        return {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    stages = enumerate(model.layers)
    return {f"layers.{stage}.blocks.{i}": block for stage, part in stages for i, block in enumerate(part.blocks)}


def _check_defaults(model: nn.Module, given: Mapping[str, object]) -> None:
    """Raise for arguments about positions that a model with positions of its own has no use for."""
    defaults = inspect.signature(retrofit).parameters
    for name, value in given.items():
        if value != defaults[name].default:
            raise ValueError(
                f"{name}={value!r} is for models without relative positions; {type(model).__name__} keeps its own: "
                f"leave {name} out"
            )


def _check_part(name: str, part: nn.Module, allowed: tuple[type[nn.Module], ...]) -> None:
    """Raise unless the part is exactly of these classes: how a subclass differs is not known."""
    if type(part) not in allowed:
        why = f": {REFUSED[type(part)]}" if type(part) in REFUSED else ""
        names = listing([cls.__name__ for cls in allowed])
        raise ValueError(f"{name} is a {type(part).__name__}, which cannot be retrofitted{why}; allowed: {names}")


def _why_not(model: nn.Module) -> str:
    """The reason why a model of this class cannot be retrofitted."""
    *first, last = (cls.__name__ for cls in RETROFITTED | IMPORTED)
    takes = f"retrofit takes timm's {', '.join(first)} and {last}"
    if isinstance(model, Retrofitted):
        return "it has been retrofitted already"
    if isinstance(model, RelVisionTransformer):
        return "it has relative positions, chosen by the arguments of timm.create_model"
    if isinstance(model, tuple(RETROFITTED | IMPORTED)):
        base = next(cls.__name__ for cls in type(model).__mro__ if cls in RETROFITTED | IMPORTED)
        return f"it is a subclass of timm's {base}, and what it does differently is not known; {takes}"
    for name, part in model.named_children():
        if type(part) in RETROFITTED | IMPORTED:
            return f"it wraps {name}, a {type(part).__name__}: retrofit that one before it is wrapped"
    names = (name for kind in ("parameters", "buffers", "modules") for name, _ in getattr(model, f"named_{kind}")())
    own = next((name for name in names if "rel_pos" in name or "relative_position" in name), None)
    return f"it has relative positions of its own, {own}; {takes}" if own else takes
